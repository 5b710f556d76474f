package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/limits"
)

// elasticFlags are the flags of a job that changes its size.
type elasticFlags struct {
	launch.Elastic
	cooldown string
}

func (e *elasticFlags) add(f *pflag.FlagSet) {
	e.Timeout = 600 * time.Second
	f.VarP(count{&e.Min, 1, limits.MaxRanks}, "min-np", "", "least `number` of processes; the job goes on as others come and go (hvd.elastic)")
	f.VarP(count{&e.Max, 1, limits.MaxRanks}, "max-np", "", "greatest `number` of processes (default: every slot)")
	f.StringVar(&e.Script, "host-discovery-script", "", "`command` that prints the hosts, one a line as host or host:slots; it runs each second")
	f.VarP(count{&e.Slots, 1, limits.MaxRanks}, "slots-per-host", "", "`slots` of a host that the script prints without (default: 1)")
	f.Var(seconds{&e.Timeout}, "elastic-timeout", "how long the job may be without --min-np processes, in `seconds`")
	f.VarP(count{&e.ResetLimit, 1, limits.MaxRanks}, "reset-limit", "", "end the job if the processes change more often than this `number`")
	f.StringVar(&e.cooldown, "blacklist-cooldown-range", "", "`seconds` for which a host gets no new process after its first failure there, and at most: 10 100 (default: for good)")
	for long, name := range map[string]string{"min-num-proc": "min-np", "max-num-proc": "max-np"} {
		f.Var(f.Lookup(name).Value, long, "")
		f.Lookup(long).Hidden = true
	}
}

// given is the elastic job that the flags describe; nil where they ask for none.
func (e *elasticFlags) given(f *pflag.FlagSet) (*launch.Elastic, error) {
	if !f.Changed("min-np") && !f.Changed("min-num-proc") && !f.Changed("host-discovery-script") {
		for _, name := range []string{"max-np", "max-num-proc", "slots-per-host", "elastic-timeout", "reset-limit", "blacklist-cooldown-range"} {
			if f.Changed(name) {
				return nil, fmt.Errorf("--%s is for a job whose number of processes may change: give --min-np too, or --host-discovery-script", name)
			}
		}
		return nil, nil
	}
	if e.cooldown == "" {
		return &e.Elastic, nil
	}
	low, high, two := strings.Cut(e.cooldown, ",")
	for i, text := range []string{low, high} {
		n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !two || !(n > 0) || n > limits.MaxRanks {
			return nil, fmt.Errorf("--blacklist-cooldown-range %q: give two numbers of seconds, as in 10 100", e.cooldown)
		}
		e.Cooldown[i] = time.Duration(n * float64(time.Second))
	}
	if e.Cooldown[0] > e.Cooldown[1] {
		return nil, fmt.Errorf("--blacklist-cooldown-range %q: the first number is the smaller one", e.cooldown)
	}
	return &e.Elastic, nil
}

// seconds is the value of a flag in seconds.
type seconds struct{ to *time.Duration }

func (s seconds) String() string {
	if s.to == nil {
		return ""
	}
	return strconv.FormatFloat(s.to.Seconds(), 'f', -1, 64)
}

func (s seconds) Type() string { return "seconds" }

func (s seconds) Set(text string) error {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n > 0) || n > 1e7 {
		return fmt.Errorf("%q is not a number of seconds over 0", text)
	}
	*s.to = time.Duration(n * float64(time.Second))
	return nil
}
