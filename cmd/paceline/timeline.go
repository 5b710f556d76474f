package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/internal/trace"
)

func timelineCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "timeline",
		Short: "Work on the timelines that PACELINE_TIMELINE makes",
		Args:  onlyCommands,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(mergeCommand())
	return c
}

func mergeCommand() *cobra.Command {
	var output string
	var summary jsonSwitch
	c := &cobra.Command{
		Use:   "merge [flags] FILE...",
		Short: "Put the timelines of several ranks into one, on the scheduler's clock",
		Long: `Put the timelines of several ranks into one, on the scheduler's clock. Perfetto (ui.perfetto.dev)
and chrome://tracing show the ranks above each other.

  PACELINE_TIMELINE=trace.json paceline run -np 2 python train.py
  paceline timeline merge -o all.json trace.json trace.1.json`,
		Args: func(_ *cobra.Command, files []string) error {
			if len(files) == 0 {
				return errors.New("name the timelines to merge: trace.json trace.1.json")
			}
			return nil
		},
		RunE: func(c *cobra.Command, files []string) error {
			if output == "-" && !summary.text() {
				return errors.New("--output - and --json both write to standard output: give --json=FILE")
			}
			if err := summary.check(); err != nil {
				return err
			}
			m, err := mergeTimelines(output, files)
			for _, w := range m.Warnings {
				fmt.Fprintln(c.ErrOrStderr(), "warning:", w)
			}
			if err != nil {
				return err
			}
			return summary.write(c, m)
		},
	}
	summary.addAs(c, "print what was merged as JSON; --json=`FILE` writes that to a file")
	c.Flags().StringVarP(&output, "output", "o", "merged.json", "`FILE` to write; - for standard output")
	return c
}

// merged is what a merge has put together.
type merged struct {
	Output   string       `json:"output"`
	Events   int          `json:"events"`  // slices of all files
	Seconds  float64      `json:"seconds"` // from the begin of the first to the end of the last
	Files    []mergedFile `json:"files"`
	Warnings []string     `json:"warnings"`
}

type mergedFile struct {
	File   string `json:"file"`
	Rank   int    `json:"rank"`
	Events int    `json:"events"`
	Cut    bool   `json:"cut"` // it ends early
}

func mergeTimelines(output string, names []string) (m merged, err error) {
	m = merged{Output: output, Files: []mergedFile{}, Warnings: []string{}}
	var files []trace.File
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return m, err
		}
		events, cut, err := trace.Read(f)
		f.Close()
		if err != nil {
			return m, fmt.Errorf("%s: %w", name, err)
		}
		if cut {
			m.Warnings = append(m.Warnings, name+": it ends early, as if its process had been killed")
		}
		m.Files = append(m.Files, mergedFile{File: name, Cut: cut})
		files = append(files, trace.File{Name: name, Events: events})
	}
	events, unaligned, err := trace.Merge(files)
	m.Warnings = append(m.Warnings, unaligned...)
	if err != nil {
		return m, err
	}
	for i, f := range files {
		clock := slices.IndexFunc(f.Events, func(e trace.Event) bool { return e.Name == trace.ClockName }) // Merge wants one
		m.Files[i].Rank, m.Files[i].Events = f.Events[clock].PID, slicesOf(f.Events)
	}
	m.Events = slicesOf(events)
	for i := range events {
		if e := &events[i]; e.Phase == trace.Slice {
			m.Seconds = max(m.Seconds, (e.Time+e.Dur)/1e6) // the earliest is at 0
		}
	}
	to := os.Stdout
	if output != "-" {
		if to, err = os.Create(output); err != nil {
			return m, err
		}
		defer func() { err = errors.Join(err, to.Close()) }()
	}
	w := trace.NewWriter(to)
	for i := range events {
		if err := w.Write(&events[i]); err != nil {
			return m, err
		}
	}
	return m, w.Close()
}

func slicesOf(events []trace.Event) (n int) {
	for i := range events {
		if events[i].Phase == trace.Slice {
			n++
		}
	}
	return n
}
