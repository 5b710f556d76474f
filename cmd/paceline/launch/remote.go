package launch

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A remote is a process on another host. A remote shell runs `sh` there, which reads a script from its
// input: nothing of the job, in particular its secret, is on a command line. The script starts the
// process in a session of its own, then reads names of signals to forward to it. When its input ends,
// because this side closes it or has died, it kills the session.
type remote struct {
	task     *Task
	cmd      *exec.Cmd
	input    io.WriteCloser
	words    chan string   // to write to the input; closing it closes the input
	over     chan struct{} // closed when the shell has ended
	mark     string        // the line that announces the running process, with its pid
	runs     func(pid int64)
	turns    chan struct{} // holds an element of each shell of the host that is on its way
	arrived  func()        // ends its turn
	unwanted chan struct{} // closed where the shell is not to be started any more

	signals sync.Mutex // ending, started, and what is sent to words
	started bool
	ending  bool

	// Held while output is written, which lasts as long as whoever reads it likes: signals go on meanwhile.
	output sync.Mutex
	begun  bool
	stdout []byte // until the mark has come
	stderr []byte
}

// patience limits the time of a remote shell between the end of its input and its own end.
const patience = 3 * time.Second

// shellsAtOnce bounds the shells of one host that are on their way: from 10 on sshd refuses some (MaxStartups 10:30:100).
const shellsAtOnce = 8

// turns are those of all hosts.
type turns map[string]chan struct{}

func (t turns) of(host string) chan struct{} {
	if t[host] == nil {
		t[host] = make(chan struct{}, shellsAtOnce)
	}
	return t[host]
}

func newRemote(t *Task, turns chan struct{}, runs func(pid int64)) *remote {
	return &remote{
		task: t, cmd: exec.Command(t.Shell[0], append(slices.Clone(t.Shell[1:]), "sh")...), words: make(chan string, 16), over: make(chan struct{}),
		mark: "paceline-runs-" + rand.Text(), runs: runs, turns: turns, arrived: sync.OnceFunc(func() { <-turns }), unwanted: make(chan struct{}),
	}
}

var errNotWanted = errors.New("was not started any more")

// start starts the shell when its turn has come.
func (r *remote) start(p *process) (drain func(), err error) {
	select {
	case r.turns <- struct{}{}:
	case <-r.unwanted:
		return nil, errNotWanted
	}
	r.signals.Lock()
	defer r.signals.Unlock()
	if r.ending {
		r.arrived()
		return nil, errNotWanted
	}
	if r.input, err = r.cmd.StdinPipe(); err == nil {
		drain, err = p.run(r.outputs())
	}
	if err != nil {
		r.arrived()
		return nil, fmt.Errorf("cannot be started: %w", err)
	}
	r.started = true
	r.begin()
	return drain, nil
}

// begin sends the script, and from then on the signals, in the background: a host that does not answer
// reads nothing.
func (r *remote) begin() {
	r.words <- r.task.script(r.mark)
	go func() {
		defer r.input.Close()
		for word := range r.words {
			if _, err := io.WriteString(r.input, word); err != nil {
				break // the shell has ended, which wait reports
			}
		}
	}()
}

// signal forwards a signal. SIGKILL ends the shell's input, and the shell itself if that has no effect.
func (r *remote) signal(sig syscall.Signal) {
	r.signals.Lock()
	defer r.signals.Unlock()
	switch {
	case r.ending:
	case !r.started:
		r.ending = true
		close(r.unwanted)
	case sig != syscall.SIGKILL:
		select {
		case r.words <- signalName(sig) + "\n":
		default: // it has not read the last ones yet
		}
	default:
		r.ending = true
		close(r.words)
		go func() {
			select {
			case <-r.over:
			case <-time.After(patience):
				syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
			}
		}()
	}
}

func signalName(sig syscall.Signal) string {
	if sig == syscall.SIGINT {
		return "INT"
	}
	return "TERM"
}

// end translates the shell's end into that of the process.
func (r *remote) end(shell Exit) Exit {
	close(r.over)
	r.arrived()
	r.signal(syscall.SIGKILL) // ends begin's goroutine
	r.output.Lock()
	defer r.output.Unlock()
	if r.begun {
		return shell
	}
	said := cmp.Or(strings.TrimSpace(string(r.stderr)), "it said nothing more")
	return Exit{Code: max(shell.Code, 1), Why: fmt.Sprintf("could not be started by %q, which %v: %s", strings.Join(r.cmd.Args, " "), shell, said)}
}

// outputs are the writers for the shell's output. Before the process runs, stdout is a login's greeting and is
// discarded; stderr is the reason if the process does not start.
func (r *remote) outputs() (stdout, stderr io.Writer) {
	return remoteStdout{r}, remoteStderr{r}
}

type remoteStdout struct{ *remote }

func (r remoteStdout) Write(p []byte) (int, error) {
	r.output.Lock()
	defer r.output.Unlock()
	if r.begun {
		return r.task.Stdout.Write(p)
	}
	r.stdout = append(r.stdout, p...)
	_, after, found := bytes.Cut(r.stdout, []byte(r.mark+" "))
	line, rest, whole := bytes.Cut(after, []byte("\n"))
	if !found || !whole {
		return len(p), nil
	}
	pid, _ := strconv.ParseInt(string(line), 10, 64)
	r.runs(pid)
	r.arrived()
	r.task.Stdout.Write(rest)
	r.task.Stderr.Write(r.stderr)
	r.begun, r.stdout, r.stderr = true, nil, nil
	return len(p), nil
}

type remoteStderr struct{ *remote }

// Write holds the output before the mark, up to a bound: beyond it, the user sees the output as it arrives.
func (r remoteStderr) Write(p []byte) (int, error) {
	r.output.Lock()
	defer r.output.Unlock()
	if !r.begun && len(r.stderr)+len(p) <= maxHeld {
		r.stderr = append(r.stderr, p...)
		return len(p), nil
	}
	r.task.Stderr.Write(r.stderr)
	r.stderr = nil
	return r.task.Stderr.Write(p)
}

// script is the input of the remote shell. It is one compound command, so the shell reads all of it before it
// runs any part.
func (t *Task) script(mark string) string {
	var s strings.Builder
	s.WriteString("{\n")
	fmt.Fprintf(&s, "cd %s || exit 1\n", Quote(t.Dir))
	for _, name := range slices.Sorted(maps.Keys(t.Env)) {
		fmt.Fprintf(&s, "export %s=%s\n", name, Quote(t.Env[name]))
	}
	s.WriteString(t.threadsThere())
	s.WriteString("exec 3<&0\nsetsid sh -c " + Quote(session) + " " + mark)
	for _, word := range t.Command {
		s.WriteString(" " + Quote(word))
	}
	s.WriteString("\nexit $?\n}\n")
	return s.String()
}

// session starts the process in the session that it leads. The watcher belongs to its process group, so
// that the group's number stays in use as long as the watcher may kill it, but is not a child of the process. What remains has tidyTime.
var session = fmt.Sprintf(`
( {
	trap "" INT TERM HUP
	while read -r signal; do kill -s "$signal" -- "-$$"; done
	kill -s TERM -- "-$$"
	sleep %d
	kill -s KILL -- "-$$"
} <&3 >/dev/null 2>&1 & )
exec 3<&- </dev/null
echo "$0 $$"
exec "$@"`, tidyTime/time.Second)

// Quote quotes a word for a shell.
func Quote(word string) string {
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
