"""The interface of an earlier test suite, for operator tests that are written against it."""
