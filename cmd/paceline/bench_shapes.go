package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/sim/shapes"
)

func benchShapesCommand() *cobra.Command {
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "shapes",
		Short: "List the models whose shapes the other benchmarks use",
		Long: `List the models whose shapes the other benchmarks use.

The JSON has the elements of each tensor, in the order of the model's definition.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			return output.show(c, shapes.All(), showShapes)
		},
	}
	output.add(c)
	return c
}

func showShapes(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer t.Flush()
	fmt.Fprintln(t, "model\ttensors\tparameters\tMB in float32\t")
	for _, s := range shapes.All() {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.1f\t\n", s.Name, len(s.Elements), s.Parameters(), 4e-6*float64(s.Parameters()))
	}
}
