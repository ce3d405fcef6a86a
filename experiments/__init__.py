"""Scripts for users; `pip install -e .` puts the repository on the path, where they find each other."""
