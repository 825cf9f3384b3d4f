"""Programs of a vendor's own graph operators: how they are built, checked and run."""
