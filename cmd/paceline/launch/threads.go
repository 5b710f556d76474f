package launch

import (
	"fmt"
	"runtime"
	"strconv"
)

// The variable from which frameworks, and the libraries of numbers below them, take how many threads compute. Without it
// each process has as many as the host has cores, and processes that share the cores wait for threads that do not run.
const threads = "OMP_NUM_THREADS"

// limitThreads gives a process on this host its part of the cores, unless the user has said how many threads it has.
func (t *Task) limitThreads() {
	if _, said := t.Env[threads]; !said && t.Sharing > 1 {
		t.Env[threads] = strconv.Itoa(max(1, runtime.GOMAXPROCS(0)/t.Sharing)) // of the cores that this process may use
	}
}

// threadsThere is the line of a script that does the same on another host.
func (t *Task) threadsThere() string {
	if t.Sharing <= 1 {
		return ""
	}
	return fmt.Sprintf("[ -n \"${%s+said}\" ] || export %s=$(($(nproc) > %d ? $(nproc) / %d : 1))\n", threads, threads, t.Sharing, t.Sharing)
}
