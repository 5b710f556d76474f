"""The checks that ranks run are arguments of the tests that start them: they need the framework at import."""

collect_ignore_glob = ["*_ranks"]
