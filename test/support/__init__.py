"""What the tests of dicp's own passes share."""
