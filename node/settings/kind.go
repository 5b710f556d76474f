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
	"unicode/utf8"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/nearest"
	"github.com/paceline/paceline/internal/secret"
)

// A kind writes, reads and bounds one setting.
type kind struct {
	allowed string // completes "allowed ..." in an error
	parse   func(*Settings, string) error
	show    func(*Settings) string
	shared  sharing
	names   []string // that it chooses from, if it does
}

// meant ends an error with the name that a misspelt value is likely to mean.
func (k kind) meant(value string) string {
	name, _, _ := strings.Cut(strings.ToLower(value), ":")
	if meant := nearest.Meant(name, k.names); meant != "" && meant != name {
		return fmt.Sprintf(" (did you mean %q?)", meant)
	}
	return ""
}

// sharing is which processes of a job must have one value of a setting: with different ones, operations would wait for
// ever, fail at their first use or give other results than the setting promises. The scheduler compares them when nodes
// register.
type sharing uint8

const (
	own       sharing = iota // each process has its own
	searchers                // all workers that autotune: their searches begin with it, and have to take the same steps
	workers                  // all workers
	nodes                    // all workers and dedicated servers
)

// among reports whether a process is one of them.
func (who sharing) among(s *Settings) bool {
	worker := s.Role == "worker"
	return who == nodes || who == workers && worker || who == searchers && worker && s.Autotune
}

// among is a kind whose values must agree among some processes.
func among(who sharing, k kind) kind {
	k.shared = who
	return k
}

// errNotAllowed stands for the row's own message.
var errNotAllowed = errors.New("not allowed")

// parsed is the kind of a field that one function reads and another one shows.
func parsed[T any](field func(*Settings) *T, allowed string, parse func(string) (T, error), show func(T) string) kind {
	return kind{
		allowed: allowed,
		parse: func(s *Settings, v string) error {
			value, err := parse(v)
			if err == nil {
				*field(s) = value
			}
			return err
		},
		show: func(s *Settings) string { return show(*field(s)) },
	}
}

// within reads as parse does, and only what is not beyond the bounds.
func within[T cmp.Ordered](low, high T, parse func(string) (T, error)) func(string) (T, error) {
	return func(v string) (T, error) {
		value, err := parse(v)
		return value, allowedIf(err == nil && value >= low && value <= high)
	}
}

// argumentError says what is wrong behind a name that is allowed, in place of the row's message.
type argumentError struct{ error }

func allowedIf(ok bool) error {
	if !ok {
		return errNotAllowed
	}
	return nil
}

// words is a text that check returns as it is stored.
func words(field func(*Settings) *string, allowed string, check func(v string) (string, error)) kind {
	return parsed(field, allowed, check, func(v string) string { return v })
}

func text(field func(*Settings) *string, allowed string) kind {
	return words(field, "is "+allowed, func(v string) (string, error) { return v, nil })
}

func choice(field func(*Settings) *string, names ...string) kind {
	k := words(field, "are "+strings.Join(names, ", "), func(v string) (string, error) {
		v = strings.ToLower(v)
		return v, allowedIf(slices.Contains(names, v))
	})
	k.names = names
	return k
}

// policy is a placement policy, with its arguments where it has some.
func policy(field func(*Settings) *string) kind {
	k := words(field, "are "+strings.Join(placement.Names(), ", "), func(v string) (string, error) {
		v = strings.ToLower(v)
		name, _, _ := strings.Cut(v, ":")
		_, err := placement.Parse(v)
		if err != nil && slices.Contains(placement.Names(), name) {
			err = argumentError{err}
		}
		return v, err
	})
	k.names = placement.Names()
	return k
}

// level is a log level. It accepts the other systems' names and Horovod's numbers too.
func level(field func(*Settings) *string) kind {
	k := choice(field, "debug", "info", "warn", "error", "fatal")
	ours := k.parse
	others := map[string]string{"trace": "debug", "warning": "warn", "0": "debug", "1": "debug", "2": "info", "3": "warn", "4": "error", "5": "fatal"}
	k.parse = func(s *Settings, v string) error { return ours(s, cmp.Or(others[strings.ToLower(v)], v)) }
	return k
}

// loopback is a port of this machine, or an address that no other reaches.
func loopback(field func(*Settings) *string) kind {
	k := address(field)
	ours := k.parse
	k.allowed = "is a port, or host:port on loopback, such as 127.0.0.1:6060"
	k.parse = func(s *Settings, v string) error {
		if _, err := strconv.ParseUint(v, 10, 16); err == nil {
			v = net.JoinHostPort(iface.Loopback, v)
		}
		if host, _, _ := net.SplitHostPort(v); !iface.IsLoopback(host) {
			return errNotAllowed
		}
		return ours(s, v)
	}
	return k
}

func address(field func(*Settings) *string) kind {
	return words(field, "is host:port, such as 10.0.0.1:7000", func(v string) (string, error) { return v, allowedIf(isAddress(v)) })
}

// addresses is a list of different addresses, separated by commas.
func addresses(field func(*Settings) *string, most int) kind {
	allowed := fmt.Sprintf("is host:port, such as 10.0.0.1:7000, or up to %d of them, separated by commas", most)
	return words(field, allowed, func(v string) (string, error) {
		all := strings.Split(v, ",")
		for i, a := range all {
			if all[i] = strings.TrimSpace(a); !isAddress(all[i]) || slices.Contains(all[:i], all[i]) {
				return "", errNotAllowed
			}
		}
		return strings.Join(all, ","), allowedIf(len(all) <= most)
	})
}

func isAddress(v string) bool {
	host, port, err := net.SplitHostPort(v)
	_, e := strconv.ParseUint(port, 10, 16)
	return err == nil && host != "" && e == nil
}

func integer(field func(*Settings) *int, low, high int) kind {
	return parsed(field, fmt.Sprintf("are %d to %d", low, high), within(low, high, strconv.Atoi), strconv.Itoa)
}

func size(field func(*Settings) *int64, low, high int64) kind {
	allowed := fmt.Sprintf("are %s to %s, as a number of bytes or with KiB, MiB, GiB", ShowSize(low), ShowSize(high))
	if high > 1<<50 {
		allowed = "is a number of bytes, or one with KiB, MiB, GiB"
	}
	return parsed(field, allowed, within(low, high, ParseSize), ShowSize)
}

func duration(field func(*Settings) *time.Duration, low, high time.Duration) kind {
	allowed := fmt.Sprintf("are %v to %v, as a number of seconds or with a unit (500ms, 10s, 2m)", low, high)
	if high == maxTime {
		allowed = "is a number of seconds, or one with a unit (500ms, 10s, 2m)"
	}
	return parsed(field, allowed, within(low, high, parseDuration), time.Duration.String)
}

func boolean(field func(*Settings) *bool) kind {
	return parsed(field, "are 1 and 0, true and false, yes and no, on and off", parseBool, strconv.FormatBool)
}

var secretKind = kind{
	allowed: fmt.Sprintf("are %d to %d bytes", secret.MinBytes, limits.MaxSecret),
	parse: func(s *Settings, v string) error {
		if strings.ContainsRune(v, utf8.RuneError) { // which Python's JSON may have made of any other byte
			return argumentError{errors.New("the secret is no text in UTF-8, and processes would read it differently: encode it (base64), or use PACELINE_JOB_SECRET_FILE")}
		}
		s.JobSecret = []byte(v)
		return secret.Check(s.JobSecret)
	},
	show: func(*Settings) string { return "" },
}

func parseBool(v string) (bool, error) {
	v = strings.ToLower(v)
	on := slices.Contains([]string{"1", "true", "yes", "on"}, v)
	return on, allowedIf(on || slices.Contains([]string{"0", "false", "no", "off"}, v))
}

func parseDuration(v string) (time.Duration, error) {
	if seconds, err := strconv.ParseFloat(v, 64); err == nil {
		return time.Duration(seconds * float64(time.Second)), allowedIf(seconds >= 0 && seconds <= maxTime.Seconds())
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
