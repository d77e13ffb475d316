"""The parts of Apex's ``contrib`` that are short in plain torch. Importing another one names its replacement."""
