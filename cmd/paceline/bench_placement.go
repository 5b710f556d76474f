package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/bench"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/nearest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/sim"
	"github.com/paceline/paceline/sim/shapes"
)

// placementOptions are the flags of `paceline bench placement`.
type placementOptions struct {
	plan                 bench.PlacementPlan
	models               []string
	bandwidth, partition string
	output               jsonSwitch
}

func benchPlacementCommand() *cobra.Command {
	var o placementOptions
	c := &cobra.Command{
		Use:   "placement",
		Short: "Compare placements on the shapes of common models",
		Long: `Compare placements on the shapes of common models.

For each placement: the bytes of the fullest server over the mean, and the time of one exchange of all gradients in
virtual time, on links of one bandwidth. The bound is that of an exchange whose pushes and answers overlap entirely.`,
		Example: `  paceline bench placement -np 8 --servers 8 --bandwidth 10Gbit
  paceline bench placement --models vgg16 --placements psld,mxnet,largest-first`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}
	f := c.Flags()
	f.SortFlags = false
	o.plan.Workers, o.plan.Servers = 8, 8
	addRanks(f, count{&o.plan.Workers, 1, sim.MaxWorkers}, "`number` of workers")
	f.Var(count{&o.plan.Servers, 1, sim.MaxServers}, "servers", "`number` of dedicated servers")
	names := each.Of(shapes.All(), func(s shapes.Shape) string { return s.Name })
	f.StringSliceVar(&o.models, "models", names, "`models`")
	f.StringSliceVar(&o.plan.Placements, "placements", placement.Names(), "`placements`, as PACELINE_PLACEMENT takes them")
	f.StringVar(&o.bandwidth, "bandwidth", "10Gbit", "`bandwidth` of each link, each way")
	f.DurationVar(&o.plan.Latency, "latency", 50*time.Microsecond, "`latency` of the network, one way")
	f.StringVar(&o.partition, "partition-bytes", "4MiB", "`size` of a partition")
	o.output.add(c)
	return c
}

func (o *placementOptions) run(c *cobra.Command) error {
	for _, name := range o.models {
		s, known := shapes.Named(name)
		if !known {
			names := each.Of(shapes.All(), func(s shapes.Shape) string { return s.Name })
			return fmt.Errorf("--models %q: %s", name, nearest.Known(name, names))
		}
		o.plan.Shapes = append(o.plan.Shapes, s)
	}
	size, err := settings.ParseSize(o.partition)
	if err != nil || size < limits.MinPartition || size > limits.MaxPartition {
		return fmt.Errorf("--partition-bytes %q: allowed are %s to %s", o.partition, settings.ShowSize(limits.MinPartition), settings.ShowSize(limits.MaxPartition))
	}
	o.plan.PartitionBytes = int(size)
	if o.plan.Bandwidth, err = sim.ParseBandwidth(o.bandwidth); err != nil {
		return fmt.Errorf("--bandwidth: %w", err)
	}
	if err := o.output.check(); err != nil {
		return err
	}
	report, err := bench.ComparePlacements(o.plan)
	if err != nil {
		return err
	}
	return o.output.show(c, report, report.Show)
}
