"""The parts of ``apex.contrib`` that exist here."""
