package main

import (
	"errors"
	"fmt"
	"os"

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
			warnings, err := mergeTimelines(output, files)
			for _, w := range warnings {
				fmt.Fprintln(c.ErrOrStderr(), "warning:", w)
			}
			return err
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "merged.json", "`FILE` to write; - for standard output")
	return c
}

func mergeTimelines(output string, names []string) (warnings []string, err error) {
	var files []trace.File
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		events, cut, err := trace.Read(f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if cut {
			warnings = append(warnings, name+": it ends early, as if its process had been killed")
		}
		files = append(files, trace.File{Name: name, Events: events})
	}
	events, unaligned, err := trace.Merge(files)
	warnings = append(warnings, unaligned...)
	if err != nil {
		return warnings, err
	}
	to := os.Stdout
	if output != "-" {
		if to, err = os.Create(output); err != nil {
			return warnings, err
		}
		defer func() { err = errors.Join(err, to.Close()) }()
	}
	w := trace.NewWriter(to)
	for i := range events {
		if err := w.Write(&events[i]); err != nil {
			return warnings, err
		}
	}
	return warnings, w.Close()
}
