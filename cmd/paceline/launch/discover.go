package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/ticks"
)

// How often the discovery script runs, and for how long.
const (
	discoverEvery = time.Second
	discoverTime  = 10 * time.Second
)

// discovery runs the script of a job.
type discovery struct {
	*Elastic
	groups []int // of scripts that have ended, where some processes may remain
}

// discover runs the script once. It prints the hosts, one on each line, as "host" or "host:slots".
func (d *discovery) discover(ctx context.Context) ([]Host, error) {
	ctx, cancel := context.WithTimeout(ctx, discoverTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", d.Script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if cmd.Process != nil {
		d.bury(-cmd.Process.Pid)
	}
	var failed *exec.ExitError
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return nil, ctx.Err()
	case ctx.Err() != nil:
		return nil, fmt.Errorf("--host-discovery-script %s has not ended after %v", d.Script, discoverTime)
	case errors.As(err, &failed):
		return nil, fmt.Errorf("--host-discovery-script %s: %w: %s", d.Script, err, strings.TrimSpace(string(failed.Stderr)))
	case err != nil:
		return nil, fmt.Errorf("--host-discovery-script %s: %w", d.Script, err)
	case len(out) > limits.MaxRunFile:
		return nil, fmt.Errorf("--host-discovery-script %s prints %d bytes, limit %d", d.Script, len(out), limits.MaxRunFile)
	}
	hosts, err := ParseFound(string(out), cmp.Or(d.Slots, 1))
	if err != nil {
		return nil, fmt.Errorf("--host-discovery-script %s: %w", d.Script, err)
	}
	return hosts, nil
}

// discoverUntil runs the script once, until a signal of the user.
func (d *discovery) discoverUntil(heard chan os.Signal) (hosts []Host, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var sig os.Signal
	var listening sync.WaitGroup
	listening.Go(func() {
		select {
		case sig = <-heard:
			cancel()
		case <-ctx.Done():
		}
	})
	hosts, err = d.discover(ctx)
	cancel()
	listening.Wait()
	if sig != nil {
		err = fmt.Errorf("--host-discovery-script %s was broken off: %w", d.Script, interrupted{sig.(syscall.Signal)})
	}
	return hosts, err
}

// bury notes the group of a script that has ended. Of those that remain in such groups this process is the parent (adopt).
func (d *discovery) bury(group int) {
	d.groups = slices.DeleteFunc(append(d.groups, group), func(g int) bool { return !orphans(g) })
}

// watch runs the script again and again, and sends the hosts whenever they are others, until stop is called. While the
// script fails the hosts stay, and the user is told once.
func (d *discovery) watch(hosts []Host, say func(string, ...any)) (found <-chan []Host, stop func()) {
	changed := make(chan []Host)
	if d.Script == "" {
		return changed, func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var loop sync.WaitGroup
	loop.Go(func() {
		failure := ""
		ticks.Until(ctx.Done(), discoverEvery, func(time.Time) {
			now, err := d.discover(ctx)
			if err == nil && len(now) == 0 { // a pipe in the script may hide that its first command has failed
				err = fmt.Errorf("--host-discovery-script %s prints no host", d.Script)
			}
			switch {
			case ctx.Err() != nil:
			case err != nil:
				if err.Error() != failure {
					failure = err.Error()
					say("%v; the hosts stay as they were", err)
				}
			case slices.Equal(now, hosts):
				failure = ""
			default:
				failure = ""
				select {
				case changed <- now:
					hosts = now
				case <-ctx.Done():
				}
			}
		})
	})
	return changed, func() { cancel(); loop.Wait() }
}
