package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/bench"
	"github.com/paceline/paceline/core/condition"
)

// Bounds of the generated input: workers, and ends of 8 bytes.
const (
	maxBenchWorkers = 100_000
	maxBenchEnds    = 20_000_000
)

func benchBarrierCommand() *cobra.Command {
	var p bench.BarrierPlan
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "barrier",
		Short: "Time the search for ElasticBSP's next barrier, and check its results",
		Long: `Time the search for ElasticBSP's next barrier, and check its results.

Workers' iterations take 1000 to 1500 ms, as in the paper on ZipLine, and have drifted apart for 1000 s of virtual
time. Inputs are made before the clock runs. A table shows the least waiting times beside the paper's table 3,
whose figures are of one input each.`,
		Example: `  paceline bench barrier -np 1000 --predictions 150 --json
  paceline bench barrier -np 10000 --predictions 15 --inputs 0 --json=barrier.json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchBarrier(c, p, &output) },
	}
	f := c.Flags()
	f.SortFlags = false
	p.Workers, p.Predictions, p.Searches, p.Inputs = 1000, 150, 20, 200
	addRanks(f, count{&p.Workers, 1, maxBenchWorkers}, "`number` of workers")
	f.Var(count{&p.Predictions, 1, condition.MaxPredictions}, "predictions", "`number` of iterations that are predicted of each")
	f.Var(count{&p.Searches, 1, 10_000}, "searches", "`number` of searches to time")
	f.Var(count{&p.Inputs, 0, 10_000}, "inputs", "greatest `number` of inputs per cell of the table; 0: no table")
	f.Uint64Var(&p.Seed, "seed", 1, "`seed` of the inputs")
	output.add(c)
	return c
}

func runBenchBarrier(c *cobra.Command, p bench.BarrierPlan, output *jsonSwitch) error {
	if ends := p.Workers * p.Predictions; ends > maxBenchEnds {
		return fmt.Errorf("-np %d and --predictions %d make %d ends: allowed are %d", p.Workers, p.Predictions, ends, maxBenchEnds)
	}
	if err := output.check(); err != nil {
		return err
	}
	report, err := bench.MeasureBarrier(p)
	if err != nil {
		return err
	}
	return output.show(c, report, report.Show)
}
