"""Running a loop program."""
