"""Scripts for users; an editable install puts the root on the path, where they are found."""
