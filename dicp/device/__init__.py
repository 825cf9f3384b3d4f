"""The eager device on PrivateUse1. Importing `dicp.device.active` registers it in the process."""
