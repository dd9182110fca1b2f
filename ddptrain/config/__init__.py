"""The configuration: its models, how a file is read and checked, and what a name in it stands for."""
