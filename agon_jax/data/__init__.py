"""Problems, where they come from, and the order in which they are trained on."""
