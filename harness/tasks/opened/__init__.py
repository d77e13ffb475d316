"""What our tasks open, each under the task's name: all that needs torch, so that to read a YAML does not."""
