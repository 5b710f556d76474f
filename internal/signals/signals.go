// Package signals has how a command ends by signals.
package signals

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// Ending are the signals by which a user ends a command. SIGHUP is none where it was ignored when the process started, as by nohup.
func Ending() []os.Signal {
	all := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}
	return slices.DeleteFunc(all, func(s os.Signal) bool { return s == syscall.SIGHUP && signal.Ignored(s) })
}

// OutliveReaders has writes fail that nobody reads any more, in place of ending this process: Ctrl-C ends `| tee log` at once, but not a job, which
// has something to do then. Processes that this one starts do not inherit that.
func OutliveReaders() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }
