"""What ``harness compare`` finds out about two runs: settings, results, and where they part. Reads files alone."""
