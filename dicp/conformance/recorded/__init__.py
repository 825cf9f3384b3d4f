"""Lists of the operators that models and programs call, recorded as cases."""
