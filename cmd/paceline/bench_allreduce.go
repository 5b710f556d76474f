package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/bench"
	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

// allreduceOptions are the flags of `paceline bench allreduce`.
type allreduceOptions struct {
	ranks          []int
	sizes          []string
	dtype          string
	servers        string
	numServers     int
	connections    int
	partition      string
	duration, idle time.Duration
	output         jsonSwitch
	resultFile     string // of a job that this command started itself
}

func benchAllreduceCommand() *cobra.Command {
	var o allreduceOptions
	c := &cobra.Command{
		Use:   "allreduce",
		Short: "Time the sum of tensors over the ranks, and check every element",
		Long: `Time the sum of tensors over the ranks, and check every element.

Starts jobs of its own on this host, one for each number of ranks; as a rank of a running job it measures
that job. bench/README.md explains the figures.`,
		Example: `  paceline bench allreduce -np 2,4 --json=allreduce.json
  paceline bench allreduce -np 4 --servers dedicated --num-servers 2 --sizes 64MiB
  paceline run -H host1:1,host2:1 paceline bench allreduce`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}
	f := c.Flags()
	f.SortFlags = false
	o.ranks = []int{2, 4}
	addRanks(f, counts{&o.ranks, 1, limits.MaxRanks}, "`numbers` of ranks, a job for each")
	f.StringSliceVar(&o.sizes, "sizes", []string{"4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"}, "`sizes` of the tensor")
	f.StringVar(&o.dtype, "dtype", units.Float32.String(), "`type` of its elements: "+strings.Join(dtypeNames(), ", "))
	f.StringVar(&o.servers, "servers", "", "`place` of the sums: embedded, dedicated or both")
	f.Var(count{&o.numServers, 0, limits.MaxServers}, "num-servers", "`number` of dedicated servers")
	f.Var(count{&o.connections, 1, limits.MaxConnsPerServer}, "connections", "`number` of connections from a worker to each server")
	f.StringVar(&o.partition, "partition", "", "`size` of the partitions")
	f.DurationVar(&o.duration, "duration", 3*time.Second, "`time` for each size")
	f.DurationVar(&o.idle, "idle", 5*time.Second, "`time` to watch the CPU while the job does nothing; 0: not at all")
	o.output.add(c)
	f.StringVar(&o.resultFile, "result", "", "")
	f.Lookup("result").Hidden = true
	return c
}

func dtypeNames() []string { return each.Of(bench.DTypes(), units.DType.String) }

// run measures as a rank, or starts the jobs whose ranks measure.
func (o *allreduceOptions) run(c *cobra.Command) error {
	plan, err := o.plan()
	if err != nil {
		return err
	}
	if err := o.output.check(); err != nil {
		return err
	}
	env := launch.Merge(launch.Variables(os.Environ()), o.settings())
	report := bench.AllreduceReport{Head: bench.NewHead("allreduce")}
	rank, err := isRank(env)
	if err != nil {
		return err
	}
	if rank {
		return o.measure(c, env, plan, report)
	}
	for _, n := range o.ranks {
		result, err := o.job(c, n, env)
		if err != nil {
			return fmt.Errorf("%d ranks: %w", n, err)
		}
		o.add(c, &report, result)
	}
	return o.output.write(c, report)
}

// isRank reports whether a launcher has made this process a rank of a job. Without a job its other settings
// need not be valid.
func isRank(env map[string]string) (bool, error) {
	s, _, err := settings.FromEnv(launch.Merge(env, map[string]string{"PACELINE_SERVERS": "embedded"}))
	return s.Launcher != "", err
}

// measure measures as a rank; rank 0 reports the result.
func (o *allreduceOptions) measure(c *cobra.Command, env map[string]string, plan bench.AllreducePlan, report bench.AllreduceReport) error {
	s, _, err := settings.FromEnv(env)
	if err != nil {
		return err
	}
	result, err := measure(s, plan)
	if err != nil || s.Rank > 0 {
		return err
	}
	if o.resultFile != "" {
		return writeJSON(o.resultFile, result)
	}
	o.add(c, &report, result)
	return o.output.write(c, report)
}

// add takes a result into the report, and shows it at once.
func (o *allreduceOptions) add(c *cobra.Command, report *bench.AllreduceReport, result bench.AllreduceResult) {
	if o.output.text() {
		result.Show(c.OutOrStdout())
	}
	report.Results = append(report.Results, result)
}

func (o *allreduceOptions) plan() (bench.AllreducePlan, error) {
	p := bench.AllreducePlan{Duration: o.duration, Idle: o.idle}
	if o.duration < 0 || o.idle < 0 {
		return p, fmt.Errorf("--duration %v and --idle %v: a time is 0 or more", o.duration, o.idle)
	}
	i := slices.Index(dtypeNames(), o.dtype)
	if i < 0 {
		return p, fmt.Errorf("--dtype %q: allowed are %s", o.dtype, strings.Join(dtypeNames(), ", "))
	}
	p.DType = bench.DTypes()[i]
	for _, text := range o.sizes {
		bytes, err := settings.ParseSize(text)
		if err != nil {
			return p, fmt.Errorf("--sizes %q: a size is a number of bytes, or one with KiB, MiB, GiB", text)
		}
		p.Sizes = append(p.Sizes, bytes)
	}
	return p, nil
}

// settings are those of the flags.
func (o *allreduceOptions) settings() map[string]string {
	env := map[string]string{"PACELINE_SERVERS": o.servers, "PACELINE_PARTITION_BYTES": o.partition, "PACELINE_CONNECTIONS": positive(o.connections)}
	maps.DeleteFunc(env, func(_, value string) bool { return value == "" })
	return env
}

func positive(n int) string {
	if n > 0 {
		return strconv.Itoa(n)
	}
	return ""
}

// job runs n ranks of this command on this host and reads their result.
func (o *allreduceOptions) job(c *cobra.Command, n int, env map[string]string) (result bench.AllreduceResult, err error) {
	self, err := os.Executable()
	if err != nil {
		return result, err
	}
	dir, err := os.MkdirTemp("", "paceline-bench-")
	if err != nil {
		return result, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "result.json")
	err = runJob(launch.Options{
		Command: []string{
			self, "bench", "allreduce", "--result", file, "--sizes", strings.Join(o.sizes, ","), "--dtype", o.dtype,
			"--duration", o.duration.String(), "--idle", o.idle.String(),
		},
		Env: env, Processes: n, Servers: strings.TrimSuffix(strings.Repeat("localhost,", o.numServers), ","), Say: sayAs(c),
	})
	if err != nil {
		return result, err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return result, err
	}
	err = json.Unmarshal(data, &result)
	return result, err
}

// measure joins the job that the environment describes.
func measure(s settings.Settings, plan bench.AllreducePlan) (result bench.AllreduceResult, err error) {
	if err := s.Complete(); err != nil {
		return result, err
	}
	ctx, stop := untilSignal()
	defer stop()
	var o node.Options
	if s.EmbedScheduler != "" {
		sched, err := node.StartScheduler(s, s.EmbedScheduler, node.Options{})
		if err != nil {
			return result, err
		}
		defer sched.Close()
		sched.Publish()
		o.Scheduler = sched.Address
	}
	w, err := node.StartWorker(ctx, s, o)
	stop() // a signal ends a rank that measures, as it does others
	if err != nil {
		return result, err
	}
	defer w.Shutdown()
	return bench.MeasureAllreduce(w, plan)
}
