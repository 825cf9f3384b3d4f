"""The operator relu on the platforms that the flags name: see runner.py."""

from runner import start

if __name__ == "__main__":
    start(__file__)
