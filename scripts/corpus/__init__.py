"""The corpus on which the shipped surrogates are trained: permissively licensed text out of packages."""
