// Package watch looks at running jobs: it asks their schedulers how far the nodes are, and shows the answers as text.
//
// Reading order: watch.go asks, view.go is what one job looks like, with rates between two looks, show.go writes it down.
package watch

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/runfile"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// Target is a job to look at.
type Target struct {
	Settings settings.Settings // by which its scheduler is reached
	Job      *runfile.Job      // nil where the job was named by its scheduler
	Err      error             // why it cannot be asked, and Settings is none; nil if it can
}

// Here is a target for each job of a list.
func Here(jobs []runfile.Job) []Target {
	targets := make([]Target, len(jobs))
	for i, j := range jobs {
		env := maps.Clone(j.Env)
		env["PACELINE_ROLE"] = "server"
		s, _, err := settings.FromEnv(env)
		if err == nil {
			err = s.Complete() // its secret may be in a file
		}
		targets[i] = Target{s, &j, err}
	}
	return targets
}

// Look asks the schedulers of all targets at the same time, each for at most some time. A job that has ended meanwhile has
// no view.
func Look(ctx context.Context, targets []Target, timeout time.Duration) []View {
	views := make([]View, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() { views[i] = t.look(ctx, timeout) })
	}
	wg.Wait()
	return slices.DeleteFunc(views, func(v View) bool { return v.over })
}

func (t Target) look(ctx context.Context, timeout time.Duration) View {
	v := View{Scheduler: t.Settings.Scheduler}
	if t.Job != nil {
		v.ID, v.Started, v.Command, v.Directory = t.Job.ID, &t.Job.Started, strings.Join(t.Job.Command, " "), t.Job.Directory
	}
	var status wire.StatusReply
	err := t.Err
	if err == nil {
		status, err = Ask(ctx, &t.Settings, timeout)
	}
	if err != nil {
		v.Err, v.Error, v.over = err, err.Error(), t.over()
		if t.Job != nil {
			v.Uptime = max(time.Since(t.Job.Started).Seconds(), 0) // Started is rounded
		}
		return v
	}
	v.StatusReply = status
	v.Ranks = ranksOf(status)
	return v
}

// over reports whether a job that was found by its file has ended since.
func (t Target) over() bool {
	if t.Job == nil {
		return false
	}
	jobs, err := runfile.List()
	return err == nil && !slices.ContainsFunc(jobs, func(j runfile.Job) bool { return j.ID == t.Job.ID && j.Started.Equal(t.Job.Started) })
}

// Ask asks one scheduler for the state of its job.
func Ask(ctx context.Context, s *settings.Settings, timeout time.Duration) (reply wire.StatusReply, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = observe(ctx, s, func(c *control.Client) error {
		reply, err = c.Status(ctx)
		return err
	})
	return reply, err
}

// Drain has a dedicated server leave its elastic job, and waits until it has left. server is its index or its address.
func Drain(ctx context.Context, s *settings.Settings, server string) error {
	return observe(ctx, s, func(c *control.Client) error { return c.Drain(ctx, wire.Drain{Server: server}) })
}

// observe asks a scheduler something, as one who takes no part in its job.
func observe(ctx context.Context, s *settings.Settings, ask func(*control.Client) error) error {
	kinds, err := node.Transports(s, zap.NewNop())
	if err != nil {
		return err
	}
	client, err := control.Dial(ctx, control.Config{
		Transport: kinds.Required(), Address: s.Scheduler, Attempt: s.PeerTimeout / 2, Hello: wire.Hello{Role: wire.RoleObserver},
	})
	if err != nil {
		return err
	}
	defer client.Close()
	return ask(client)
}

// Since adds to each view the rates since a look before.
func Since(before, now []View) []View {
	for i := range now {
		at := slices.IndexFunc(before, func(v View) bool { return v.ID == now[i].ID && v.Scheduler == now[i].Scheduler })
		if at >= 0 {
			now[i].rates(&before[at])
		}
	}
	return now
}
