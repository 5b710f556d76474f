package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/paceline/paceline/internal/limits"
)

// A horovodFlag is a flag of horovodrun whose effect, if it has one here, is a setting.
type horovodFlag struct {
	name    string
	takes   string                            // kind of its value; "" for a switch
	setting string                            // the variable it sets; "" for none
	value   func(text string) (string, error) // of the flag to that of the setting; nil where they are the same
	usage   string
}

// settingFlags are the flags that set something.
var settingFlags = []horovodFlag{
	{"start-timeout", "seconds", "PACELINE_START_TIMEOUT", nil, "how long the ranks wait for each other at the start"},
	{"fusion-threshold-mb", "MB", "PACELINE_FUSION_BYTES", fusionBytes, "tensors of up to this size travel together; 0 sends each alone"},
	{"timeline-filename", "file", "PACELINE_TIMELINE", nil, "write a Chrome trace: rank 0 to file.json, rank 1 to file.1.json, and so on"},
	{"no-stall-check", "", "PACELINE_STALL_WARNING", onlyIf("0"), "never warn of tensors that wait for ranks, nor end them"},
	{"stall-check-warning-time-seconds", "seconds", "PACELINE_STALL_WARNING", nil, "warn of a tensor that waits for ranks after this time"},
	{"stall-check-shutdown-time-seconds", "seconds", "PACELINE_STALL_SHUTDOWN", nil, "end it with an error after this time; 0 for never"},
	{"autotune", "", "PACELINE_AUTOTUNE", nil, "search for the fastest partition size, credit, batch and connections while training runs"},
	{"no-autotune", "", "PACELINE_AUTOTUNE", onlyIf("0"), "no such search, whatever the environment says"},
	{"autotune-log-file", "file", "PACELINE_AUTOTUNE_LOG", nil, "write the trials of that search: rank 0, comma-separated values"},
	{"autotune-warmup-samples", "n", "PACELINE_AUTOTUNE_WARMUP_SAMPLES", nil, "trials at the beginning that are not measured"},
	{"autotune-steps-per-sample", "n", "PACELINE_AUTOTUNE_STEPS_PER_SAMPLE", nil, "steps of each trial"},
	{"log-level", "level", "PACELINE_LOG_LEVEL", nil, "what is logged: debug, info, warn, error, fatal"},
	{"elastic", "", "PACELINE_ELASTIC", nil, "go on without ranks and servers that are lost"},
	{"num-servers", "n", "PACELINE_NUM_SERVERS", nil, "dedicated servers that run already and belong to the job"},
	{"remote-shell", "command", "PACELINE_REMOTE_SHELL", nil, "how to reach other hosts; {host} stands for the host (default ssh)"},
}

// idleFlags are accepted for compatibility and have no effect.
var idleFlags = []horovodFlag{
	{name: "gloo"}, {name: "mpi"}, {name: "jsrun"}, {name: "tcp"}, {name: "disable-cache"}, {name: "stall-check"},
	{name: "cycle-time-ms", takes: "ms"}, {name: "cache-capacity", takes: "n"}, {name: "timeline-mark-cycles"}, {name: "no-timeline-mark-cycles"},
	{name: "hierarchical-allreduce"}, {name: "no-hierarchical-allreduce"}, {name: "hierarchical-allgather"}, {name: "no-hierarchical-allgather"},
	{name: "autotune-bayes-opt-max-samples", takes: "n"}, {name: "autotune-gaussian-process-noise", takes: "x"},
	{name: "mpi-threads-disable"}, {name: "no-mpi-threads-disable"}, {name: "mpi-args", takes: "args"}, {name: "binding-args", takes: "args"},
	{name: "num-nccl-streams", takes: "n"}, {name: "ccl-bgt-affinity", takes: "n"}, {name: "thread-affinity", takes: "n"}, {name: "gloo-timeout-seconds", takes: "n"},
	{name: "log-with-timestamp"}, {name: "log-without-timestamp"}, {name: "log-hide-timestamp"}, {name: "no-log-hide-timestamp"},
}

// word is the unchecked value of a flag; the setting checks it.
type word struct{ text, kind string }

func (w *word) String() string        { return w.text }
func (w *word) Type() string          { return w.kind }
func (w *word) Set(text string) error { w.text = text; return nil }

func addHorovodFlags(flags *pflag.FlagSet) {
	for _, list := range [][]horovodFlag{settingFlags, idleFlags} {
		for _, f := range list {
			if f.takes == "" {
				flags.Bool(f.name, false, f.usage)
			} else {
				flags.Var(&word{kind: f.takes}, f.name, f.usage)
			}
			flags.Lookup(f.name).Hidden = f.usage == ""
		}
	}
}

// settingsOf are the variables that the given flags set.
func settingsOf(flags *pflag.FlagSet) (map[string]string, error) {
	env := map[string]string{}
	for _, f := range settingFlags {
		flag := flags.Lookup(f.name)
		if !flag.Changed {
			continue
		}
		value := flag.Value.String()
		if f.value != nil {
			var err error
			if value, err = f.value(value); err != nil {
				return nil, fmt.Errorf("--%s: %w", f.name, err)
			}
		}
		if value != "" {
			env[f.setting] = value
		}
	}
	if flags.Lookup("no-stall-check").Value.String() == "true" { // Horovod neither warns then nor ends anything, whatever the times are
		env["PACELINE_STALL_WARNING"], env["PACELINE_STALL_SHUTDOWN"] = "0", "0"
	}
	return env, nil
}

// given lists the flags that were given, as people write them.
func given(flags *pflag.FlagSet, list []horovodFlag) []string {
	var names []string
	for _, f := range list {
		if flags.Lookup(f.name).Changed {
			names = append(names, "--"+f.name)
		}
	}
	return names
}

// fusionBytes turns Horovod's megabytes into at most the limit of one frame.
func fusionBytes(text string) (string, error) {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n >= 0) {
		return "", fmt.Errorf("%q is not a number of megabytes", text)
	}
	return strconv.Itoa(int(min(n*(1<<20), limits.MaxFused))), nil
}

// onlyIf sets the value where the switch is on, nothing where it is off.
func onlyIf(value string) func(string) (string, error) {
	return func(text string) (string, error) {
		if text != "true" {
			return "", nil
		}
		return value, nil
	}
}

// longFlags writes the flags that horovodrun spells with one dash and several letters with two, up to
// the user's command. Other commands have one of them, the number of ranks.
func longFlags(args []string) []string {
	if len(args) == 0 {
		return args
	}
	if args[0] != "run" {
		out := slices.Clone(args)
		for i, word := range out {
			out[i] = longRanks(word)
		}
		return out
	}
	long := map[string]string{"-cb": "--check-build", "-hostfile": "--hostfile", "-prefix-timestamp": "--prefix-output-with-timestamp"}
	flags := runCommand().Flags()
	out := slices.Clone(args)
	for i := 1; i < len(out) && strings.HasPrefix(out[i], "-") && out[i] != "--"; i++ {
		out[i] = longRanks(out[i])
		name, value, joined := strings.Cut(out[i], "=")
		if long[name] != "" {
			out[i] = long[name]
			if joined {
				out[i] += "=" + value
			}
		}
		switch {
		case !joined && name == "--blacklist-cooldown-range" && i+2 < len(out): // horovodrun's flag takes two words
			out = slices.Concat(out[:i], []string{name + "=" + strings.TrimSuffix(out[i+1], ",") + "," + out[i+2]}, out[i+3:])
		case !joined && takesNext(flags, out[i]):
			i++
		}
	}
	return out
}

// longRanks writes the number of ranks with two dashes: -np 4, -np=4 or -np4.
func longRanks(word string) string {
	n, ok := strings.CutPrefix(word, "-np")
	switch {
	case !ok:
		return word
	case n == "" || n[0] == '=':
		return "-" + word
	}
	return "--np=" + n
}

// takesNext reports whether a flag's value is the next word.
func takesNext(flags *pflag.FlagSet, word string) bool {
	var flag *pflag.Flag
	switch {
	case strings.HasPrefix(word, "--"):
		flag = flags.Lookup(word[2:])
	case len(word) == 2:
		flag = flags.ShorthandLookup(word[1:])
	}
	return flag != nil && flag.NoOptDefVal == ""
}
