package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Task is one process to run.
type Task struct {
	Name    string // for people: "rank 3", "the server"
	Rank    *int   // of a worker whose rank stays
	Host    string
	Shell   []string // how to get a shell on the host; nil for a process on this one
	Dir     string
	Env     map[string]string // the whole environment here, the exported part on another host
	Command []string
	Sharing int // processes of the job that compute on the host, among them this one; 0 for a server
	Stdout  *Stream
	Stderr  *Stream
}

// Exit is how a process ended.
type Exit struct {
	Code    int            // exit code; 128 + the signal's number if a signal killed it
	Signal  syscall.Signal // that killed it, 0 if none
	Started bool           // false: it never ran
	Why     string         // it did not start: the shell's output
}

func (e Exit) String() string {
	switch {
	case !e.Started:
		return e.Why
	case e.Signal == syscall.SIGKILL:
		return "was killed by signal 9 (SIGKILL, which also is what the kernel sends when memory runs out)"
	case e.Signal != 0:
		return fmt.Sprintf("was killed by signal %d (%v)", int(e.Signal), e.Signal)
	case e.Code > 128 && e.Code < 128+65: // a shell's convention
		return fmt.Sprintf("ended with exit code %d (signal %d, %v)", e.Code, e.Code-128, syscall.Signal(e.Code-128))
	}
	return fmt.Sprintf("ended with exit code %d", e.Code)
}

// process is a started task. Each has a process group of its own, which receives signals.
type process struct {
	*Task
	cmd     *exec.Cmd
	remote  *remote      // nil for a process on this host
	pid     atomic.Int64 // on its host; 0 until it runs
	began   time.Time
	ending  atomic.Bool   // it has ended, and what remains of its group may tidy up
	hurried atomic.Bool   // not any more: the user has asked twice
	safe    chan struct{} // closed when the guard knows of it: nobody sees its output before
	told    sync.Once

	dismissed bool // of an elastic job: its end is no failure
	late      bool // it was given up because it does not run
}

// start runs the task; ended is called once, after its end and the end of its output. A shell on another host has its turn first.
func start(t *Task, turns chan struct{}, ended func(Exit)) (*process, error) {
	p := &process{Task: t, began: time.Now(), safe: make(chan struct{})}
	var run func() Exit // waits for the end
	if t.Shell == nil {
		p.cmd = t.localCommand()
		drain, err := p.run(t.Stdout, t.Stderr)
		if err != nil {
			return nil, fmt.Errorf("%s on %s cannot be started: %w", t.Name, t.Host, t.noCommand(err))
		}
		p.pid.Store(int64(p.cmd.Process.Pid))
		run = func() Exit { return p.wait(drain) }
	} else {
		r := newRemote(t, turns, p.pid.Store)
		p.remote, p.cmd = r, r.cmd
		p.guarded()
		run = func() Exit {
			drain, err := r.start(p)
			if err != nil {
				return Exit{Code: 127, Why: err.Error()}
			}
			return r.end(p.wait(drain))
		}
	}
	go func() {
		exit := run()
		t.Stdout.Close()
		t.Stderr.Close()
		ended(exit)
	}()
	return p, nil
}

// wait waits for the end of a process and of its output.
func (p *process) wait(drain func()) Exit {
	err := p.cmd.Wait()
	p.ending.Store(true)
	p.clean()
	drain()
	return exitOf(p.cmd.ProcessState, err)
}

// drainTime limits the wait for output after a process's end, in case a descendant outside of its group holds
// the pipe open.
const drainTime = 2 * time.Second

// run starts the command with pipes for its output. drain waits until they are empty.
func (p *process) run(stdout, stderr io.Writer) (drain func(), err error) {
	var readers, writers []*os.File
	defer func() {
		for _, w := range writers {
			w.Close()
		}
	}()
	for range 2 {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		readers, writers = append(readers, r), append(writers, w)
	}
	p.cmd.Stdout, p.cmd.Stderr = writers[0], writers[1]
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		for _, r := range readers {
			r.Close()
		}
		return nil, err
	}
	var copies sync.WaitGroup
	for i, to := range []io.Writer{stdout, stderr} {
		copies.Go(func() {
			<-p.safe
			if _, err := io.Copy(to, readers[i]); errors.Is(err, os.ErrDeadlineExceeded) {
				rest(to, readers[i])
			}
		})
	}
	return func() {
		late := time.AfterFunc(drainTime, func() {
			for _, r := range readers {
				r.SetReadDeadline(time.Now())
			}
		})
		copies.Wait()
		late.Stop()
		for _, r := range readers {
			r.Close()
		}
	}, nil
}

// rest copies what lies in a pipe, which is all that a process has left there that has ended, however slowly its output was read before.
func rest(to io.Writer, from *os.File) {
	raw, err := from.SyscallConn()
	if err != nil {
		return
	}
	there := 0
	_ = raw.Control(func(fd uintptr) { there, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	from.SetReadDeadline(time.Time{})
	_, _ = io.CopyN(to, from, int64(there)) // at once, but for the writing: a descendant may go on with the pipe
}

// guarded lets the process's output be seen.
func (p *process) guarded() { p.told.Do(func() { close(p.safe) }) }

// signal forwards a signal to the process and its descendants. Those that are left when it has ended are killed by clean, in their own time.
func (p *process) signal(sig syscall.Signal) {
	if p.remote != nil {
		p.remote.signal(sig)
		return
	}
	if sig == syscall.SIGKILL && p.ending.Load() {
		return
	}
	syscall.Kill(-p.cmd.Process.Pid, sig)
}

// tidyTime is how long the processes that remain in the group may tidy up: Python's multiprocessing has one that removes what the others have left in /dev/shm.
const tidyTime = 3 * time.Second

// clean ends the processes that remain in the group.
func (p *process) clean() {
	if p.remote != nil { // session does
		return
	}
	group := -p.cmd.Process.Pid
	syscall.Kill(group, syscall.SIGTERM)
	for until := time.Now().Add(tidyTime); orphans(group) && time.Now().Before(until) && !p.hurried.Load(); {
		time.Sleep(5 * time.Millisecond)
	}
	syscall.Kill(group, syscall.SIGKILL)
}

// adopt makes this process the parent of orphans, to see their end: in many containers nobody waits for them, and who has ended remains in its group.
func adopt() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// orphans reports whether processes of a group remain, and buries those that have ended.
func orphans(group int) bool {
	for {
		pid, err := syscall.Wait4(group, nil, syscall.WNOHANG, nil)
		if pid <= 0 && err != syscall.EINTR {
			return err == nil
		}
	}
}

// bury waits for the orphans that have ended. Others wait for whom this process has started, each of which leads a group: what may be one of these
// stays until the next call, when somebody has waited for it.
func (r *run) bury() {
	for {
		pid := zombie()
		if pid == 0 {
			return
		}
		if group, err := unix.Getpgid(pid); err != nil || group == pid || group == unix.Getpgrp() {
			if r.unburied != pid || r.started(pid) {
				r.unburied = pid
				return
			}
		}
		_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
	}
}

// started reports whether this process has started a process, and waits for it.
func (r *run) started(pid int) bool {
	for _, p := range r.alive {
		if p.remote == nil && p.cmd.Process.Pid == pid {
			return true
		}
	}
	return pid == r.guard.cmd.Process.Pid
}

// zombie is the number of a child that has ended and that nobody has waited for, 0 for none.
func zombie() int {
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		switch err {
		case unix.EINTR:
		case nil:
			return int((*[5]int32)(unsafe.Pointer(&info))[4]) // behind three numbers, on 64 bits
		default:
			return 0
		}
	}
}

func exitOf(state *os.ProcessState, err error) Exit {
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		return Exit{Code: 1, Why: err.Error()}
	}
	exit := Exit{Code: state.ExitCode(), Started: true}
	if status := state.Sys().(syscall.WaitStatus); status.Signaled() {
		exit.Signal = status.Signal()
		exit.Code = 128 + int(exit.Signal)
	}
	return exit
}
