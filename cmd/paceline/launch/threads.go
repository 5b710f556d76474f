package launch

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
)

// The variables from which frameworks take how many threads compute: PyTorch, MXNet and the libraries of numbers below them;
// TensorFlow; JAX. Without them each process has as many as the host has cores, and processes that share the cores wait for
// threads that do not run. TensorFlow's other pool (TF_NUM_INTEROP_THREADS) runs operations that may wait for each other.
var threads = []string{"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"}

// limitThreads gives a process on this host its part of the cores, unless the user has said how many threads it has.
func (t *Task) limitThreads() {
	if t.Sharing <= 1 {
		return
	}
	for _, name := range threads {
		if _, said := t.Env[name]; !said {
			t.Env[name] = strconv.Itoa(max(1, runtime.GOMAXPROCS(0)/t.Sharing)) // of the cores that this process may use
		}
	}
}

// threadsThere are the lines of a script that do the same on another host, if it says how many cores it has.
func (t *Task) threadsThere() string {
	if t.Sharing <= 1 {
		return ""
	}
	var s strings.Builder
	s.WriteString("if paceline_cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null); then\n") // which nproc itself reads
	for _, name := range threads {
		fmt.Fprintf(&s, "[ -n \"${%s+said}\" ] || export %s=$((paceline_cores > %d ? paceline_cores / %d : 1))\n", name, name, t.Sharing, t.Sharing)
	}
	s.WriteString("fi\n")
	return s.String()
}
