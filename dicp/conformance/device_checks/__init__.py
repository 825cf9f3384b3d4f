"""What a device does beside its operators: `utest`."""
