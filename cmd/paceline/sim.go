package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/sim"
)

// simOptions are the flags of `paceline sim`.
type simOptions struct {
	scenario                   sim.Scenario // flags without parsing
	models, parkings, barriers []string
	compute, until             string
	bytes                      string
	bandwidth, serverBandwidth string
	plotFile                   string
	output                     jsonSwitch
}

func simCommand() *cobra.Command {
	var o simOptions
	c := &cobra.Command{
		Use:   "sim",
		Short: "Run a job in virtual time: up to 10,000 workers, any model, any cluster",
		Long: `Run a job in virtual time: up to 10,000 workers, any model, any cluster.

Drives the conditions and barriers of a real job with workers that compute for a random time and links that
have a bandwidth and a latency. Runs repeat for a seed, and each is checked while it runs: a violation of a
model's guarantees is an error. Give --model, --parking or --barrier several times to compare: the
iterations of a worker take equally long in all runs.

Models: ` + strings.Join(condition.Names(), ", ") + `,
with arguments as in ssp:3, pssp:3,0.5, dsps:3,15, drop-stragglers:60, adaptive:2,4 or elastic:15.

Compute times (SIGMA is that of a log-normal factor, 0 by default):
` + sim.ComputeHelp(),
		Example: `  paceline sim --model bsp --model ssp:3 --model pssp:3,0.5 --compute transient:100ms,0.05,5 --plot models.svg
  paceline sim -np 10000 --servers 200 --iterations 3 --compute lognormal:1s,0.2 --bandwidth 10Gbit
  paceline sim --model ssp:3 --parking lazy --parking soft-barrier --compute slow:100ms,3 --json
  paceline sim papers --dir docs`,
		Args: onlyCommands,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}
	f := c.Flags()
	f.SortFlags = false
	s := &o.scenario
	s.Workers = 16
	addRanks(f, count{&s.Workers, 1, sim.MaxWorkers}, "`number` of workers")
	f.IntVar(&s.Servers, "servers", 4, "`number` of servers")
	f.IntVar(&s.Keys, "keys", 4, "`number` of keys of each server")
	f.IntVar(&s.Iterations, "iterations", 100, "`number` of iterations of each worker")
	f.StringVar(&o.until, "until", sim.All.String(), "`end` of the run: each worker has done these iterations (all), or together they have done as many (total)")
	f.StringArrayVar(&o.models, "model", []string{"bsp"}, "synchronisation `model`, as in a job's settings; several with spaces between")
	f.StringSliceVar(&o.parkings, "parking", []string{condition.Lazy.String()}, "parking `order` of delayed pulls: lazy or soft-barrier")
	f.StringSliceVar(&o.barriers, "barrier", []string{sim.Overlap.String()}, "`decider`: overlap (each server for its keys) or global (a scheduler)")
	f.StringVar(&o.compute, "compute", "lognormal:100ms,0.1", "computing `times` of the iterations")
	f.StringVar(&o.bytes, "bytes", "4MiB", "`size` of the model, which travels both ways in every iteration")
	f.StringVar(&o.bandwidth, "bandwidth", "10Gbit", "`bandwidth` of a worker's link each way, or unlimited")
	f.StringVar(&o.serverBandwidth, "server-bandwidth", "", "`bandwidth` of a server's link each way (default: as a worker's)")
	f.DurationVar(&s.Latency, "latency", 50*time.Microsecond, "`time` between any two, one way")
	f.DurationVar(&s.ServerCost, "server-cost", 0, "`time` of a server's one processor for a key of a worker, when it arrives and again when it is answered")
	f.Uint64Var(&s.Seed, "seed", 1, "`seed` of the computing times")
	o.output.add(c)
	f.StringVar(&o.plotFile, "plot", "", "SVG `file` for a chart of the parts of the time")
	c.AddCommand(simPapersCommand())
	return c
}

func (o *simOptions) run(c *cobra.Command) error {
	if err := o.output.check(); err != nil {
		return err
	}
	scenarios, err := o.scenarios()
	if err != nil {
		return err
	}
	var results []sim.Result
	for _, s := range scenarios {
		r, err := sim.Run(s)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	if o.plotFile != "" {
		title := fmt.Sprintf("%d workers, %d servers, %s", o.scenario.Workers, o.scenario.Servers, o.compute)
		if err := os.WriteFile(o.plotFile, []byte(sim.Breakdown(title, results).SVG()), 0o666); err != nil {
			return err
		}
	}
	return o.output.show(c, results, func(out io.Writer) { sim.Show(out, results) })
}

// scenarios combines every model with every parking order and barrier.
func (o *simOptions) scenarios() (all []sim.Scenario, err error) {
	s := o.scenario
	if s.Until, err = named("until", o.until, sim.All, sim.Total); err != nil {
		return nil, err
	}
	if s.Compute, err = sim.ParseCompute(o.compute); err != nil {
		return nil, fmt.Errorf("--compute: %w", err)
	}
	if s.Bytes, err = settings.ParseSize(o.bytes); err != nil {
		return nil, fmt.Errorf("--bytes %q: a size is a number of bytes, or one with KiB, MiB, GiB", o.bytes)
	}
	if s.Bandwidth, err = sim.ParseBandwidth(o.bandwidth); err != nil {
		return nil, fmt.Errorf("--bandwidth: %w", err)
	}
	if s.ServerBandwidth = s.Bandwidth; o.serverBandwidth != "" {
		if s.ServerBandwidth, err = sim.ParseBandwidth(o.serverBandwidth); err != nil {
			return nil, fmt.Errorf("--server-bandwidth: %w", err)
		}
	}
	models := o.settings()
	if len(models) == 0 {
		return nil, fmt.Errorf("--model: missing, known are: %s", strings.Join(condition.Names(), ", "))
	}
	for _, setting := range models {
		if s.Model, err = condition.Parse(setting); err != nil {
			return nil, fmt.Errorf("--model: %w", err)
		}
		for _, parking := range o.parkings {
			if s.Parking, err = named("parking", parking, condition.Lazy, condition.SoftBarrier); err != nil {
				return nil, err
			}
			for _, barrier := range o.barriers {
				if s.Barrier, err = named("barrier", barrier, sim.Overlap, sim.Global); err != nil {
					return nil, err
				}
				if err := s.Check(); err != nil {
					return nil, err
				}
				all = append(all, s)
			}
		}
	}
	return all, nil
}

// settings are the models. Spaces separate them, since commas separate a model's arguments; an expression may
// contain spaces, so it stands alone.
func (o *simOptions) settings() (all []string) {
	for _, m := range o.models {
		if strings.HasPrefix(m, "expression:") {
			all = append(all, m)
			continue
		}
		all = append(all, strings.Fields(m)...)
	}
	return all
}

// named is the value with the name.
func named[T fmt.Stringer](flag, name string, values ...T) (T, error) {
	var names []string
	for _, v := range values {
		if v.String() == name {
			return v, nil
		}
		names = append(names, v.String())
	}
	var none T
	return none, fmt.Errorf("--%s %q: allowed are %s", flag, name, strings.Join(names, " and "))
}
