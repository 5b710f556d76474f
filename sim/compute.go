package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
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

// MaxCompute bounds the parts of a setting, so that no sum of times overflows.
const MaxCompute = time.Hour

// distribution is a line of the table of settings.
type distribution struct {
	usage string // optional arguments in brackets
	what  string
	make  func(a *numbers) func(draw) time.Duration
}

func (d distribution) name() string { name, _, _ := strings.Cut(d.usage, ":"); return name }

// distributions is the table of settings. SIGMA is that of a log-normal factor of median 1 on every
// iteration, 0 by default.
func distributions() []distribution {
	return []distribution{
		{"constant:T", "every iteration takes T", func(a *numbers) func(draw) time.Duration {
			t := a.time("T")
			return func(draw) time.Duration { return t }
		}},
		{"uniform:LOW,HIGH", "each between LOW and HIGH", func(a *numbers) func(draw) time.Duration {
			low := a.time("LOW")
			high := a.timeFrom("HIGH", low)
			return func(d draw) time.Duration { return between(low, high, d.rng.Float64()) }
		}},
		{"lognormal:MEDIAN,SIGMA", "log-normal", func(a *numbers) func(draw) time.Duration {
			t := a.time("MEDIAN")
			sigma := a.number("SIGMA", 0, 3)
			return func(d draw) time.Duration { return noisy(t, sigma, d.rng) }
		}},
		{"slow:T,FACTOR[,SIGMA[,FROM]]", "worker 0 takes FACTOR times T, from its iteration FROM on", func(a *numbers) func(draw) time.Duration {
			t, factor := a.time("T"), a.number("FACTOR", 1, 1000)
			sigma := a.optional("SIGMA", 0, 3)
			from := uint64(a.optional("FROM", 0, MaxIterations))
			return func(d draw) time.Duration {
				if d.rank == 0 && d.iteration >= from {
					return noisy(scale(t, factor), sigma, d.rng)
				}
				return noisy(t, sigma, d.rng)
			}
		}},
		{"transient:T,P,FACTOR[,SIGMA]", "an iteration takes FACTOR times T with probability P", func(a *numbers) func(draw) time.Duration {
			t, p, factor := a.time("T"), a.number("P", 0, 1), a.number("FACTOR", 1, 1000)
			sigma := a.optional("SIGMA", 0, 3)
			return func(d draw) time.Duration {
				if d.rng.Float64() < p {
					return noisy(scale(t, factor), sigma, d.rng)
				}
				return noisy(t, sigma, d.rng)
			}
		}},
		{"spread:LOW,HIGH[,SIGMA]", "each worker has a time of its own between LOW and HIGH", func(a *numbers) func(draw) time.Duration {
			low := a.time("LOW")
			high := a.timeFrom("HIGH", low)
			sigma := a.optional("SIGMA", 0, 3)
			return func(d draw) time.Duration { return noisy(between(low, high, d.own), sigma, d.rng) }
		}},
	}
}

// ParseCompute makes the distribution that a setting names, with its arguments behind a colon:
// "lognormal:100ms,0.3".
func ParseCompute(setting string) (Compute, error) {
	name, rest, _ := strings.Cut(setting, ":")
	for _, d := range distributions() {
		if d.name() != name {
			continue
		}
		a := &numbers{text: rest, more: rest != ""}
		c := Compute{draw: d.make(a)}
		if a.more {
			a.fail("takes no argument %q", a.text)
		}
		if a.err != nil {
			return Compute{}, fmt.Errorf("compute time %q: %w (it is written %s)", setting, a.err, d.usage)
		}
		return c, nil
	}
	return Compute{}, fmt.Errorf("unknown compute time %q, allowed are %s", setting, computeUsage())
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
	var all []string
	for _, d := range distributions() {
		all = append(all, d.usage)
	}
	return strings.Join(all, " ")
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
	return time.Duration(math.Round(float64(t) * factor))
}

// numbers are the arguments of a setting. The first faulty one is the error, and values read after it are
// undefined.
type numbers struct {
	text string
	more bool
	err  error
}

func (a *numbers) fail(format string, values ...any) {
	if a.err == nil {
		a.err = fmt.Errorf(format, values...)
	}
	a.more = false
}

func (a *numbers) next(name string) (word string, ok bool) {
	if !a.more {
		a.fail("%s is missing", name)
		return "", false
	}
	word, a.text, a.more = strings.Cut(a.text, ",")
	return strings.TrimSpace(word), true
}

func (a *numbers) time(name string) time.Duration { return a.timeFrom(name, 0) }

func (a *numbers) timeFrom(name string, least time.Duration) time.Duration {
	word, ok := a.next(name)
	if !ok {
		return 0
	}
	t, err := time.ParseDuration(word)
	if err != nil || t < least || t > MaxCompute {
		a.fail("%s is %q, allowed is a time as 250ms, from %v to %v", name, word, least, MaxCompute)
	}
	return t
}

func (a *numbers) number(name string, least, most float64) float64 {
	word, ok := a.next(name)
	if !ok {
		return 0
	}
	v, err := strconv.ParseFloat(word, 64)
	if err != nil || !(v >= least && v <= most) {
		a.fail("%s is %q, allowed is a number from %g to %g", name, word, least, most)
	}
	return v
}

// optional is 0 if no argument is left.
func (a *numbers) optional(name string, least, most float64) float64 {
	if !a.more {
		return 0
	}
	return a.number(name, least, most)
}
