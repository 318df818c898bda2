"""What SGLang needs to serve on a CPU. Imported at every start of Python: keep it empty."""
