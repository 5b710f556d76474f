package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/sim/papers"
)

// simPapersCommand is `paceline sim papers`.
func simPapersCommand() *cobra.Command {
	lab := papers.Default()
	var dir string
	c := &cobra.Command{
		Use:   "papers",
		Short: "Repeat the papers' experiments in virtual time, beside what they report",
		Long: `Repeat the papers' experiments in virtual time, beside what they report.

Writes the simulated part of DIR/results.md, between its two marks, and a chart for each experiment to DIR/results.
It takes less than a minute on one core.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if lab.Iterations < 10 {
				return fmt.Errorf("--iterations %d: allowed is 10 and more", lab.Iterations)
			}
			if err := lab.Write(dir); err != nil {
				return err
			}
			fmt.Fprintln(c.OutOrStdout(), "wrote", filepath.Join(dir, "results.md"), "and its charts")
			return nil
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&dir, "dir", "docs", "`directory` of results.md")
	f.IntVar(&lab.Iterations, "iterations", lab.Iterations, "`number` of iterations of each worker")
	f.IntVar(&lab.Scale, "scale", lab.Scale, "`number` of workers of the largest job")
	f.Uint64Var(&lab.Seed, "seed", lab.Seed, "`seed` of the computing times")
	return c
}
