package settings

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/secret"
)

// A kind writes, reads and bounds one setting.
type kind struct {
	allowed string // completes "allowed ..." in an error
	parse   func(*Settings, string) error
	show    func(*Settings) string
	shared  sharing
}

// sharing is which processes of a job must have one value of a setting: with different ones, operations would wait for
// ever, fail at their first use or give other results than the setting promises. The scheduler compares them when nodes
// register.
type sharing uint8

const (
	own     sharing = iota // each process has its own
	workers                // all workers
	nodes                  // all workers and dedicated servers
)

// among is a kind whose values must agree among some processes.
func among(who sharing, k kind) kind {
	k.shared = who
	return k
}

// errNotAllowed stands for the row's own message.
var errNotAllowed = errors.New("not allowed")

func text(field func(*Settings) *string, allowed string) kind {
	return kind{
		allowed: "is " + allowed,
		parse:   func(s *Settings, v string) error { *field(s) = v; return nil },
		show:    func(s *Settings) string { return *field(s) },
	}
}

func choice(field func(*Settings) *string, names ...string) kind {
	k := text(field, strings.Join(names, ", "))
	k.allowed = "are " + strings.Join(names, ", ")
	k.parse = func(s *Settings, v string) error {
		v = strings.ToLower(v)
		if !slices.Contains(names, v) {
			return errNotAllowed
		}
		*field(s) = v
		return nil
	}
	return k
}

// policy is a placement policy, with its arguments where it has some.
func policy(field func(*Settings) *string) kind {
	k := text(field, "")
	k.allowed = "are " + strings.Join(placement.Names(), ", ")
	k.parse = func(s *Settings, v string) error {
		v = strings.ToLower(v)
		if _, err := placement.Parse(v); err != nil {
			return errNotAllowed
		}
		*field(s) = v
		return nil
	}
	return k
}

// level is a log level. It accepts the other systems' names and Horovod's numbers too.
func level(field func(*Settings) *string) kind {
	k := choice(field, "debug", "info", "warn", "error", "fatal")
	ours := k.parse
	others := map[string]string{"trace": "debug", "warning": "warn", "0": "debug", "1": "debug", "2": "info", "3": "warn", "4": "error", "5": "fatal"}
	k.parse = func(s *Settings, v string) error {
		if name, ok := others[strings.ToLower(v)]; ok {
			v = name
		}
		return ours(s, v)
	}
	return k
}

func address(field func(*Settings) *string) kind {
	k := text(field, "host:port, such as 10.0.0.1:7000")
	k.parse = func(s *Settings, v string) error {
		host, port, err := net.SplitHostPort(v)
		if _, e := strconv.ParseUint(port, 10, 16); err != nil || host == "" || e != nil {
			return errNotAllowed
		}
		*field(s) = v
		return nil
	}
	return k
}

func integer(field func(*Settings) *int, low, high int) kind {
	return kind{
		allowed: fmt.Sprintf("are %d to %d", low, high),
		parse: func(s *Settings, v string) error {
			n, err := strconv.Atoi(v)
			if err != nil || n < low || n > high {
				return errNotAllowed
			}
			*field(s) = n
			return nil
		},
		show: func(s *Settings) string { return strconv.Itoa(*field(s)) },
	}
}

func size(field func(*Settings) *int64, low, high int64) kind {
	allowed := fmt.Sprintf("are %s to %s, as a number of bytes or with KiB, MiB, GiB", ShowSize(low), ShowSize(high))
	if high > 1<<50 {
		allowed = "is a number of bytes, or one with KiB, MiB, GiB"
	}
	return kind{
		allowed: allowed,
		parse: func(s *Settings, v string) error {
			n, err := ParseSize(v)
			if err != nil || n < low || n > high {
				return errNotAllowed
			}
			*field(s) = n
			return nil
		},
		show: func(s *Settings) string { return ShowSize(*field(s)) },
	}
}

func duration(field func(*Settings) *time.Duration, low, high time.Duration) kind {
	allowed := fmt.Sprintf("are %v to %v, as a number of seconds or with a unit (500ms, 10s, 2m)", low, high)
	if high == maxTime {
		allowed = "is a number of seconds, or one with a unit (500ms, 10s, 2m)"
	}
	return kind{
		allowed: allowed,
		parse: func(s *Settings, v string) error {
			d, err := parseDuration(v)
			if err != nil || d < low || d > high {
				return errNotAllowed
			}
			*field(s) = d
			return nil
		},
		show: func(s *Settings) string { return field(s).String() },
	}
}

func boolean(field func(*Settings) *bool) kind {
	return kind{
		allowed: "are 1 and 0, true and false, yes and no, on and off",
		parse: func(s *Settings, v string) (err error) {
			*field(s), err = parseBool(v)
			return err
		},
		show: func(s *Settings) string { return strconv.FormatBool(*field(s)) },
	}
}

var secretKind = kind{
	allowed: fmt.Sprintf("are %d to %d bytes", secret.MinBytes, limits.MaxSecret),
	parse: func(s *Settings, v string) error {
		s.JobSecret = []byte(v)
		return secret.Check(s.JobSecret)
	},
	show: func(*Settings) string { return "" },
}

func parseBool(v string) (bool, error) {
	switch strings.ToLower(v) {
	case "1", "true", "yes", "on":
		return true, nil
	case "0", "false", "no", "off":
		return false, nil
	}
	return false, errNotAllowed
}

func parseDuration(v string) (time.Duration, error) {
	if seconds, err := strconv.ParseFloat(v, 64); err == nil {
		if !(seconds >= 0 && seconds <= maxTime.Seconds()) {
			return 0, errNotAllowed
		}
		return time.Duration(seconds * float64(time.Second)), nil
	}
	return time.ParseDuration(v)
}

// units of a size, the longest names first. Like Horovod and the shells, all are powers of two.
var sizeUnits = []struct {
	name  string
	bytes int64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1 << 10}, {"mb", 1 << 20}, {"gb", 1 << 30}, {"tb", 1 << 40},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1},
}

// ParseSize reads a number of bytes: 4194304, 4MiB, 1.5G.
func ParseSize(v string) (int64, error) {
	number, unit := strings.ToLower(v), int64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		if n < 0 || n > (1<<63-1)/unit {
			return 0, errNotAllowed
		}
		return n * unit, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || !(f >= 0 && f*float64(unit) < 1<<62) {
		return 0, errNotAllowed
	}
	return int64(f * float64(unit)), nil
}

// ShowSize writes a number of bytes in the largest unit that divides it.
func ShowSize(n int64) string {
	for _, u := range []struct {
		name  string
		bytes int64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.bytes && n%u.bytes == 0 {
			return fmt.Sprintf("%d %s", n/u.bytes, u.name)
		}
	}
	return strconv.FormatInt(n, 10)
}

// The conversions of other systems' values.

// ifTrue turns a switch that is on into the value here.
func ifTrue(value string) func(*Settings, string) (string, bool) {
	return func(_ *Settings, v string) (string, bool) {
		on, err := parseBool(v)
		return value, err == nil && on
	}
}

// ifPositive turns a number over 0 into the value here.
func ifPositive(value string) func(*Settings, string) (string, bool) {
	return func(_ *Settings, v string) (string, bool) {
		n, err := strconv.Atoi(v)
		return value, err == nil && n > 0
	}
}

func unless(nothing string) func(*Settings, string) (string, bool) {
	return func(_ *Settings, v string) (string, bool) { return v, v != nothing }
}

func atMost(bound int64) func(*Settings, string) (string, bool) {
	return func(_ *Settings, v string) (string, bool) {
		if n, err := ParseSize(v); err == nil && n > bound {
			return strconv.FormatInt(bound, 10), true
		}
		return v, true
	}
}

// partitions turns a number of partitions into bytes; 0 is BytePS's "no limit", which its own default is.
func partitions(s *Settings, v string) (string, bool) {
	n, err := strconv.ParseInt(v, 10, 32)
	if err != nil {
		return v, true
	}
	return strconv.FormatInt(n*cmp.Or(s.PartitionBytes, 4<<20), 10), n != 0
}
