package codec

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Arguments are the part of a setting behind the colon. The getters remove them one by one and record errors; what no
// getter removes is an error too.
type Arguments struct {
	given map[string]string // the value without a name under ""
	known []string
	first error
}

func parseArguments(text string) *Arguments {
	a := &Arguments{given: map[string]string{}}
	if text == "" {
		return a
	}
	for part := range strings.SplitSeq(text, ",") {
		name, value, named := strings.Cut(part, "=")
		if !named {
			name, value = "", part
		}
		if _, twice := a.given[name]; twice {
			a.Fail("%q is given twice", part)
		}
		a.given[name] = value
	}
	return a
}

// Fail records an error of the arguments: Parse fails with the first.
func (a *Arguments) Fail(format string, args ...any) {
	if a.first == nil {
		a.first = fmt.Errorf(format, args...)
	}
}

func (a *Arguments) err() error {
	if a.first != nil {
		return a.first
	}
	if len(a.given) == 0 {
		return nil
	}
	name := slices.Min(slices.Collect(maps.Keys(a.given)))
	if name == "" {
		return fmt.Errorf("%q has no name: %s", a.given[name], a.allowed())
	}
	return fmt.Errorf("unknown parameter %q: %s", name, a.allowed())
}

func (a *Arguments) allowed() string {
	if len(a.known) == 0 {
		return "there are none"
	}
	return "allowed are " + strings.Join(a.known, ", ")
}

// remove deletes an argument and returns its value.
func (a *Arguments) remove(name string) (value string, ok bool) {
	if name != "" {
		a.known = append(a.known, name)
	}
	value, ok = a.given[name]
	delete(a.given, name)
	return value, ok
}

// Integer takes a whole number from least to most.
func (a *Arguments) Integer(name string, otherwise, least, most int) int {
	text, ok := a.remove(name)
	if !ok {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		a.Fail("%s %q: allowed are whole numbers from %d to %d", name, text, least, most)
		return otherwise
	}
	return n
}

// Number takes a number that valid accepts; allowed describes these.
func (a *Arguments) Number(name string, otherwise float64, allowed string, valid func(float64) bool) float64 {
	text, ok := a.remove(name)
	if !ok {
		return otherwise
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !valid(f) {
		a.Fail("%s %q: allowed are %s", cmp.Or(name, "value"), text, allowed)
		return otherwise
	}
	return f
}

// Choice takes one of some words; the first is the default.
func (a *Arguments) Choice(name string, words ...string) string {
	text, ok := a.remove(name)
	switch {
	case !ok:
		return words[0]
	case !slices.Contains(words, text):
		a.Fail("%s %q: allowed are %s", name, text, strings.Join(words, ", "))
	}
	return text
}

// Feedback takes whether there is a residual.
func (a *Arguments) Feedback(otherwise bool) bool {
	words := []string{"off", "on"}
	if otherwise {
		slices.Reverse(words)
	}
	return a.Choice("feedback", words...) == "on"
}

// Setting writes a codec's name and arguments as Parse reads them. Empty parts are left out.
func Setting(name string, parts ...string) string {
	parts = slices.DeleteFunc(parts, func(p string) bool { return p == "" })
	if len(parts) == 0 {
		return name
	}
	return name + ":" + strings.Join(parts, ",")
}

// FeedbackPart is the part of a setting that says so where the residual is not the codec's default.
func FeedbackPart(is, otherwise bool) string {
	switch {
	case is == otherwise:
		return ""
	case is:
		return "feedback=on"
	}
	return "feedback=off"
}

func text(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) }
