// Package setting reads settings of the form name:argument,argument, for example "ssp:3".
package setting

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Arguments are the part of a setting behind the colon. Getters read them one by one; the first faulty one is the
// error, and values read after it are undefined.
type Arguments struct {
	what, setting, usage string // "synchronisation model", "ssp:3" and "ssp:S", for errors
	text                 string // of the arguments that are left
	given                bool   // whether there are any
	err                  error
}

// Read begins to read the arguments of a setting. what is the kind of setting, and usage its form, both for errors.
func Read(what, setting, usage string) Arguments {
	_, text, given := strings.Cut(setting, ":")
	return Arguments{what: what, setting: setting, usage: usage, text: text, given: given}
}

// Whole reads a whole number from least to most.
func (a *Arguments) Whole(name string, least, most uint64) uint64 {
	word := a.next(name)
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil || n < least || n > most {
		a.Fail("%s is %q, allowed is a whole number from %d to %d", name, word, least, most)
	}
	return n
}

// Number reads a number from least to most.
func (a *Arguments) Number(name string, least, most float64) float64 {
	word := a.next(name)
	v, err := strconv.ParseFloat(word, 64)
	if err != nil || !(v >= least && v <= most) {
		a.Fail("%s is %q, allowed is a number from %g to %g", name, word, least, most)
	}
	return v
}

// Time reads a time from least to most.
func (a *Arguments) Time(name string, least, most time.Duration) time.Duration {
	word := a.next(name)
	t, err := time.ParseDuration(word)
	if err != nil || t < least || t > most {
		a.Fail("%s is %q, allowed is a time as 250ms, from %v to %v", name, word, least, most)
	}
	return t
}

// Word consumes the next argument if it is this word.
func (a *Arguments) Word(word string) bool {
	first, rest, more := strings.Cut(a.text, ",")
	if !a.More() || strings.TrimSpace(first) != word {
		return false
	}
	a.text, a.given = rest, more
	return true
}

// More reports whether another argument follows.
func (a *Arguments) More() bool { return a.given && a.err == nil }

// Rest consumes all arguments that are left, unchanged.
func (a *Arguments) Rest() string {
	text := a.text
	a.text, a.given = "", false
	return text
}

// next reads an argument unchanged.
func (a *Arguments) next(name string) (word string) {
	if !a.More() {
		a.Fail("%s is missing", name)
		return ""
	}
	word, a.text, a.given = strings.Cut(a.text, ",")
	return strings.TrimSpace(word)
}

// Fail records an error of the arguments, unless there is one already.
func (a *Arguments) Fail(format string, values ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("%s %q: %s (it is written %s)", a.what, a.setting, fmt.Sprintf(format, values...), a.usage)
	}
}

// Err is the error of a faulty or superfluous argument, after all have been read.
func (a *Arguments) Err() error {
	if a.More() {
		a.Fail("takes no argument %q", a.text)
	}
	return a.err
}
