"""What the commands of `kvquilt` do, one module for each group. Imports nothing until a command runs."""
