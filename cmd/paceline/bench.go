package main

import "github.com/spf13/cobra"

func benchCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "bench", Short: "Measure all-reduce, codecs, the search for barriers, placements or many workers, and check the results",
		Args: onlyCommands, RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(benchAllreduceCommand(), benchCodecCommand(), benchBarrierCommand(), benchPlacementCommand(), benchShapesCommand(), benchScaleCommand())
	return c
}
