"""What can only be shown on a GPU, by one command and into one report: ``make gpu``, or its ``--plan``."""
