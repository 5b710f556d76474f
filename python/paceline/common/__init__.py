"""What every framework's module shares: exceptions, process sets, reduction operators."""
