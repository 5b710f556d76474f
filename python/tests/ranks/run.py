"""The program of each rank of test_ranks.py: python run.py DIRECTORY PYTEST_ARGUMENTS..."""

import os
import sys

import pytest

directory, arguments = sys.argv[1], sys.argv[2:]
sys.exit(pytest.main([f"--junitxml={directory}/rank{os.environ['RANK']}.xml", *arguments]))
