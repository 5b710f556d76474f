package launch

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// localCommand is the task's command as a process on this host. Its name is looked for in the PATH
// that the process will have.
func (t *Task) localCommand() *exec.Cmd {
	cmd := exec.Command(t.Command[0], t.Command[1:]...)
	cmd.Dir, cmd.Env = t.Dir, Lines(t.Env)
	if path, err := lookPath(t.Command[0], t.Env["PATH"]); err == nil {
		cmd.Path, cmd.Err = path, nil
	}
	return cmd
}

// noCommand says why a command on this host cannot be started, and what was meant if it is a Python script.
func (t *Task) noCommand(err error) error {
	switch name := t.Command[0]; {
	case filepath.Ext(name) == ".py" && !t.has(name):
		return fmt.Errorf("there is no file %s in %s", name, t.Dir)
	case filepath.Ext(name) == ".py":
		return fmt.Errorf("%s is no program; run it as python %s", name, strings.Join(t.Command, " "))
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("there is no program %q on the PATH", name)
	}
	return err
}

// has reports whether there is a file by the path that the task gives it.
func (t *Task) has(path string) bool {
	if !filepath.IsAbs(path) {
		path = filepath.Join(t.Dir, path)
	}
	_, err := os.Stat(path)
	return err == nil
}

func lookPath(name, path string) (string, error) {
	if strings.Contains(name, "/") {
		return exec.LookPath(name)
	}
	for _, dir := range filepath.SplitList(path) {
		if found, err := exec.LookPath(filepath.Join(dir, name)); err == nil && filepath.IsAbs(dir) {
			return found, nil
		}
	}
	return "", exec.ErrNotFound
}

// A guard is a small process that outlives this one: when this one is killed (SIGKILL), the
// guard ends the process groups that remain.
type guard struct {
	cmd  *exec.Cmd
	tell io.WriteCloser
}

// The guard reads lines of the groups that are alive, the last one counts, until its input ends.
const guardScript = `groups=
while read -r line; do groups=$line; done
[ -z "$groups" ] || kill -s KILL -- $groups`

func newGuard() (*guard, error) {
	cmd := exec.Command("/bin/sh", "-c", guardScript)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	tell, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("the guard against orphans cannot be started: %w", err)
	}
	return &guard{cmd, tell}, nil
}

// watch sends the live processes to the guard.
func (g *guard) watch(alive iter.Seq[*process]) {
	var line strings.Builder
	for p := range alive {
		if p.remote == nil { // others end when their shell's input does
			fmt.Fprintf(&line, "-%d ", p.cmd.Process.Pid)
		}
	}
	fmt.Fprintln(g.tell, line.String())
	for p := range alive {
		p.guarded()
	}
}

func (g *guard) close() {
	g.cmd.Process.Kill()
	g.cmd.Wait()
	g.tell.Close()
}
