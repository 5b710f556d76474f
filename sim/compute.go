package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/setting"
)

// Compute is the distribution of the computing times of each worker's iterations. Make it with ParseCompute.
type Compute struct {
	draw func(d draw) time.Duration
}

// draw is the source of a time: a worker's own generator, so that its k-th iteration takes equally long under
// every model, and comparisons compare only models.
type draw struct {
	rng       *rand.Rand
	rank      int
	own       float64 // of the worker, uniform in [0, 1)
	iteration uint64
}

// MaxCompute bounds the times of a setting.
const MaxCompute = time.Hour

// distribution is a line of the table of settings.
type distribution struct {
	usage string // optional arguments in brackets
	what  string
	make  func(a *setting.Arguments) func(draw) time.Duration
}

func (d distribution) name() string { name, _, _ := strings.Cut(d.usage, ":"); return name }

// distributions is the table of settings. SIGMA is that of a log-normal factor of median 1 on every
// iteration, 0 by default.
func distributions() []distribution {
	return []distribution{
		{"constant:T", "every iteration takes T", func(a *setting.Arguments) func(draw) time.Duration {
			t := timeFrom(a, "T", 0)
			return func(draw) time.Duration { return t }
		}},
		{"uniform:LOW,HIGH", "each between LOW and HIGH", func(a *setting.Arguments) func(draw) time.Duration {
			low := timeFrom(a, "LOW", 0)
			high := timeFrom(a, "HIGH", low)
			return func(d draw) time.Duration { return between(low, high, d.rng.Float64()) }
		}},
		{"lognormal:MEDIAN,SIGMA", "log-normal", func(a *setting.Arguments) func(draw) time.Duration {
			t := timeFrom(a, "MEDIAN", 0)
			sigma := a.Number("SIGMA", 0, 3)
			return func(d draw) time.Duration { return noisy(t, sigma, d.rng) }
		}},
		{"slow:T,FACTOR[,SIGMA[,FROM]]", "worker 0 takes FACTOR times T, from its iteration FROM on", func(a *setting.Arguments) func(draw) time.Duration {
			t, factor := timeFrom(a, "T", 0), a.Number("FACTOR", 1, 1000)
			sigma := optional(a, "SIGMA", 3)
			from := uint64(optional(a, "FROM", MaxIterations))
			return func(d draw) time.Duration {
				if d.rank == 0 && d.iteration >= from {
					return noisy(scale(t, factor), sigma, d.rng)
				}
				return noisy(t, sigma, d.rng)
			}
		}},
		{"transient:T,P,FACTOR[,SIGMA]", "an iteration takes FACTOR times T with probability P", func(a *setting.Arguments) func(draw) time.Duration {
			t, p, factor := timeFrom(a, "T", 0), a.Number("P", 0, 1), a.Number("FACTOR", 1, 1000)
			sigma := optional(a, "SIGMA", 3)
			return func(d draw) time.Duration {
				if d.rng.Float64() < p {
					return noisy(scale(t, factor), sigma, d.rng)
				}
				return noisy(t, sigma, d.rng)
			}
		}},
		{"spread:LOW,HIGH[,SIGMA]", "each worker has a time of its own between LOW and HIGH", func(a *setting.Arguments) func(draw) time.Duration {
			low := timeFrom(a, "LOW", 0)
			high := timeFrom(a, "HIGH", low)
			sigma := optional(a, "SIGMA", 3)
			return func(d draw) time.Duration { return noisy(between(low, high, d.own), sigma, d.rng) }
		}},
	}
}

// ParseCompute makes the distribution that a setting names, with its arguments behind a colon:
// "lognormal:100ms,0.3".
func ParseCompute(text string) (Compute, error) {
	name, _, _ := strings.Cut(text, ":")
	for _, d := range distributions() {
		if d.name() == name {
			a := setting.Read("compute time", text, d.usage)
			c := Compute{draw: d.make(&a)}
			if err := a.Err(); err != nil {
				return Compute{}, err
			}
			return c, nil
		}
	}
	return Compute{}, fmt.Errorf("unknown compute time %q, allowed are %s", text, computeUsage())
}

// ComputeHelp describes the settings of ParseCompute, a line each.
func ComputeHelp() string {
	var b strings.Builder
	for _, d := range distributions() {
		fmt.Fprintf(&b, "  %-29s %s\n", d.usage, d.what)
	}
	return b.String()
}

func computeUsage() string {
	return strings.Join(each.Of(distributions(), func(d distribution) string { return d.usage }), " ")
}

// noisy is t times a log-normal factor of median 1.
func noisy(t time.Duration, sigma float64, rng *rand.Rand) time.Duration {
	if sigma == 0 {
		return t
	}
	return scale(t, math.Exp(sigma*rng.NormFloat64()))
}

func between(low, high time.Duration, x float64) time.Duration { return low + scale(high-low, x) }

func scale(t time.Duration, factor float64) time.Duration {
	return time.Duration(min(math.Round(float64(t)*factor), float64(forever)))
}

func timeFrom(a *setting.Arguments, name string, least time.Duration) time.Duration {
	return a.Time(name, least, MaxCompute)
}

// optional is a number from 0 to most, 0 if no argument is left.
func optional(a *setting.Arguments, name string, most float64) float64 {
	if !a.More() {
		return 0
	}
	return a.Number(name, 0, most)
}
