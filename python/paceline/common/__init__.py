"""Shared by the frameworks' modules: exceptions, process sets, reduction operators."""
