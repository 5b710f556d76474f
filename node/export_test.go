package node

// For jobs over a transport of the test's own.
var (
	RunServerOver      = runServer
	StartSchedulerOver = startScheduler
)
