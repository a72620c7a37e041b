# Each target is one visible line; labkit/bootstrap.py makes .venv first where that is needed.
# PYTHON=python3.12 chooses the interpreter, PORT= and NO_BROWSER=1 are for lab, ARGS= goes to pytest or the benchmarks.
# The suite runs in two processes side by side; ARGS="-n 0" is one, and what --pdb and -s need.
PYTHON ?= python3

.PHONY: lab test check bench

lab:
	$(PYTHON) labkit/bootstrap.py lab

test:
	$(PYTHON) labkit/bootstrap.py test $(ARGS)

check:
	$(PYTHON) labkit/bootstrap.py check

bench:
	$(PYTHON) labkit/bootstrap.py bench $(ARGS)
