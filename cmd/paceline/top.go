package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/paceline/paceline/cmd/paceline/watch"
)

func topCommand() *cobra.Command {
	var choice jobChoice
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "top [job]",
		Short: "Show the same as status, live; q ends it",
		Long: `Show the same as status, live, until q, Ctrl-C or the end of the job.

Rates are those of the last nine seconds. The ranks that do not answer or are furthest behind come first where the
terminal has no room for all. Without a terminal the state is printed once.

With --json each job's state is one line of JSON each second, with the time, with and without a terminal, until a signal or, of
jobs on this machine, their end.`,
		Example: `  paceline top
  paceline top 4711
  paceline top --json`,
		Args: atMostOneJob,
		RunE: func(c *cobra.Command, args []string) error {
			screen, _ := c.OutOrStdout().(*os.File)
			terminal := screen != nil && term.IsTerminal(int(screen.Fd()))
			switch {
			case output.to != "" && (!terminal || !output.text()):
				return choice.record(c, args, &output)
			case terminal:
				return choice.top(c, args, screen, &output)
			}
			return choice.status(c, args, &jsonSwitch{})
		},
	}
	choice.add(c)
	output.addAs(c, "print a line of JSON for each job each second in place of the text; --json=`FILE` writes them to a file beside it")
	return c
}

// The rhythm of top.
const (
	redrawTime = time.Second
	topLooks   = 10 // over which rates are measured
)

// top draws the jobs again and again.
func (j *jobChoice) top(c *cobra.Command, args []string, screen *os.File, output *jsonSwitch) (err error) {
	targets, err := j.targets(args)
	if err != nil {
		return err
	}
	write, end, err := output.stream(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	ctx, stop := untilSignal()
	defer stop()
	keys := os.Stdin
	if before, err := term.MakeRaw(int(keys.Fd())); err == nil {
		defer func() { _ = term.Restore(int(keys.Fd()), before) }()
		go func() { readKeys(keys); stop() }()
	}
	fmt.Fprint(screen, enterScreen)
	over, err := j.follow(ctx, args, targets, func(views []watch.View) error {
		paint(screen, views)
		return snapshots(views, write)
	})
	fmt.Fprint(screen, leaveScreen)
	if over {
		fmt.Fprint(screen, "the job is over\r\n")
	}
	return err
}

// record writes the jobs as JSON, again and again; beside a file the text is printed once.
func (j *jobChoice) record(c *cobra.Command, args []string, output *jsonSwitch) (err error) {
	targets, err := j.targets(args)
	if err != nil {
		return err
	}
	write, end, err := output.stream(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	ctx, stop := untilSignal()
	defer stop()
	shown := !output.text()
	_, err = j.follow(ctx, args, targets, func(views []watch.View) error {
		if !shown {
			shown = true
			watch.Show(c.OutOrStdout(), views, 0)
		}
		return snapshots(views, write)
	})
	return err
}

// snapshot is a job at a time, one line of JSON.
type snapshot struct {
	Time time.Time `json:"time"`
	watch.View
}

func snapshots(views []watch.View, write func(any) error) error {
	now := time.Now()
	for _, v := range views {
		if err := write(snapshot{now, v}); err != nil {
			return err
		}
	}
	return nil
}

// follow looks each second until ctx ends or the jobs do, which it reports.
func (j *jobChoice) follow(ctx context.Context, args []string, targets []watch.Target, show func([]watch.View) error) (over bool, err error) {
	tick := time.NewTicker(redrawTime)
	defer tick.Stop()
	var looks [][]watch.View
	for {
		views := watch.Look(ctx, targets, j.patience(len(targets)))
		if ctx.Err() != nil {
			return false, nil
		}
		if looks = append(looks, views); len(looks) > topLooks {
			looks = looks[1:]
		}
		if err := show(watch.Since(looks[0], views)); err != nil {
			return false, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false, nil
		}
		if targets[0].Job == nil { // an address that was given, not one that was found
			continue
		}
		if targets, err = j.targets(args); err != nil {
			return true, nil
		}
	}
}

// The ANSI sequences of a terminal: another screen without a cursor, and back.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearRest   = "\x1b[J"
)

// paint fills the screen.
func paint(screen *os.File, views []watch.View) {
	width, height, err := term.GetSize(int(screen.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	var text bytes.Buffer
	watch.Show(&text, views, max(height-12, 1))
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	lines = append(lines[:max(min(len(lines), height-2), 0)], "", "q: leave")
	var frame bytes.Buffer
	frame.WriteString(home)
	for i, line := range lines {
		if letters := []rune(line); len(letters) > width {
			line = string(letters[:width])
		}
		frame.WriteString(line + clearLine)
		if i < len(lines)-1 {
			frame.WriteString("\r\n")
		}
	}
	frame.WriteString(clearRest)
	fmt.Fprint(screen, frame.String())
}

// readKeys returns with the key that leaves: q, Ctrl-C or the end of the input.
func readKeys(keys io.Reader) {
	key := make([]byte, 1)
	for {
		n, err := keys.Read(key)
		if err != nil || n == 1 && (key[0] == 'q' || key[0] == 'Q' || key[0] == 3) {
			return
		}
	}
}
