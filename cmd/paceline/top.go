package main

import (
	"bytes"
	"context"
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
	c := &cobra.Command{
		Use:   "top [job]",
		Short: "Show the same as status, live; q ends it",
		Long: `Show the same as status, live, until q, Ctrl-C or the end of the job.

Rates are those of the last ten seconds. The ranks that do not answer or are furthest behind come first where the
terminal has no room for all. Without a terminal the state is printed once.`,
		Example: `  paceline top
  paceline top 4711`,
		Args: atMostOneJob,
		RunE: func(c *cobra.Command, args []string) error {
			if screen, ok := c.OutOrStdout().(*os.File); ok && term.IsTerminal(int(screen.Fd())) {
				return choice.top(args, screen)
			}
			return choice.status(c, args, &jsonSwitch{})
		},
	}
	choice.add(c)
	return c
}

// The rhythm of top.
const (
	redrawTime = time.Second
	topLooks   = 10 // over which rates are measured
)

// top draws the jobs again and again.
func (j *jobChoice) top(args []string, screen *os.File) error {
	targets, err := j.targets(args)
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	keys := os.Stdin
	if before, err := term.MakeRaw(int(keys.Fd())); err == nil {
		defer func() { _ = term.Restore(int(keys.Fd()), before) }()
		go func() { readKeys(keys); stop() }()
	}
	fmt.Fprint(screen, enterScreen)
	last, err := j.draw(ctx, args, targets, screen)
	fmt.Fprint(screen, leaveScreen)
	fmt.Fprint(screen, last)
	return err
}

// draw draws until ctx ends or the jobs do, and returns a last word for the terminal.
func (j *jobChoice) draw(ctx context.Context, args []string, targets []watch.Target, screen *os.File) (last string, err error) {
	tick := time.NewTicker(redrawTime)
	defer tick.Stop()
	var looks [][]watch.View
	for {
		views := watch.Look(ctx, targets, j.patience(len(targets)))
		if ctx.Err() != nil {
			return "", nil
		}
		if looks = append(looks, views); len(looks) > topLooks {
			looks = looks[1:]
		}
		paint(screen, watch.Since(looks[0], views))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return "", nil
		}
		if targets, err = j.targets(args); err != nil {
			return "the job is over\r\n", nil
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
