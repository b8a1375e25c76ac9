"""`python -P -m agent`."""

from agent.cli import main

if __name__ == "__main__":
    main()
