package main

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/paceline/paceline/internal/nearest"
)

// count is a flag for a whole number between two bounds.
type count struct {
	n           *int
	least, most int
}

func (v count) String() string {
	if v.n == nil {
		return ""
	}
	return strconv.Itoa(*v.n)
}

func (v count) Type() string { return "number" }

func (v count) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < v.least || n > v.most {
		return fmt.Errorf("allowed are whole numbers from %d to %d", v.least, v.most)
	}
	*v.n = n
	return nil
}

// counts is a flag for a list of such numbers.
type counts struct {
	n           *[]int
	least, most int
}

func (v counts) String() string {
	if v.n == nil {
		return ""
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(*v.n), " ", ","), "[]")
}

func (v counts) Type() string { return "numbers" }

func (v counts) Set(text string) error {
	var list []int
	for item := range strings.SplitSeq(text, ",") {
		var n int
		if err := (count{&n, v.least, v.most}).Set(strings.TrimSpace(item)); err != nil {
			return fmt.Errorf("%w, with commas between", err)
		}
		list = append(list, n)
	}
	*v.n = list
	return nil
}

// alsoRanks are other names that people give the flag -np.
var alsoRanks = []string{"num-proc", "ranks", "workers"}

// likeRanks are the names of torchrun's flag, which counts the ranks of one host.
var likeRanks = []string{"nproc", "nproc-per-node", "nproc_per_node"}

// addRanks adds the flag for the number of ranks, which has one name in all commands: -np, --np or -n. What else people
// write means the same.
func addRanks(flags *pflag.FlagSet, value pflag.Value, usage string) {
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if slices.Contains(alsoRanks, name) {
			name = "np"
		}
		return pflag.NormalizedName(name)
	})
	flags.VarP(value, "np", "n", usage+"; also -np")
}

// noArguments refuses the words that follow a command and its flags.
func noArguments(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return cmp.Or(namesFile(c, args[0]), fmt.Errorf("unexpected argument %q", args[0]))
}

// namesFile is an error about a word that is probably the file for the JSON; nil where none is asked for.
func namesFile(c *cobra.Command, word string) error {
	if f := c.Flags().Lookup("json"); f == nil || !f.Changed || f.Value.String() != toTerminal {
		return nil
	}
	return fmt.Errorf("unexpected argument %q: to write the JSON to that file, give --json=%s", word, word)
}

// onlyCommands refuses words that are none of the command's own commands.
func onlyCommands(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, sub := range c.Commands() {
		if !sub.Hidden {
			names = append(names, sub.Name())
		}
	}
	if err := namesFile(c, args[0]); err != nil {
		return err
	}
	hint := "the commands are " + strings.Join(names, ", ")
	switch meant := nearest.Meant(args[0], names); {
	case meant != "" && meant[0] == args[0][0]: // the first letter is mostly right: who wants to train does not mean to drain
		hint = fmt.Sprintf("did you mean %q?", c.CommandPath()+" "+meant)
	case !c.HasParent() && filepath.Ext(args[0]) == ".py":
		hint = fmt.Sprintf("did you mean %q?", "paceline run -np 2 python "+args[0])
	}
	return fmt.Errorf("there is no command %q: %s", args[0], hint)
}

// badFlag says what is wrong with a flag, and what is allowed.
func badFlag(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	var empty *pflag.ValueRequiredError
	switch {
	case errors.As(err, &unknown):
		if c.HasSubCommands() { // a command that there is not, with its flags
			if err := onlyCommands(c, c.Flags().Args()); err != nil {
				return err
			}
		}
		return unknownFlag(c, unknown)
	case errors.As(err, &empty):
		_, usage := pflag.UnquoteUsage(empty.GetFlag())
		return fmt.Errorf("%s needs a value: %s", flagName(empty.GetFlag()), usage)
	case errors.As(err, &invalid):
		return fmt.Errorf("%s %q: %s", flagName(invalid.GetFlag()), invalid.GetValue(), allowed(invalid.GetFlag(), errors.Unwrap(invalid)))
	}
	return err
}

func unknownFlag(c *cobra.Command, e *pflag.NotExistError) error {
	given, word := "--"+e.GetSpecifiedName(), e.GetSpecifiedName()
	if letters := e.GetSpecifiedShortnames(); letters != "" {
		given, word = "-"+letters, letters
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	if c.Flags().Lookup("np") != nil {
		names = slices.Concat(names, alsoRanks, likeRanks)
	}
	hint := c.CommandPath() + " --help lists the flags"
	meant := nearest.Meant(word, names)
	if slices.Contains(likeRanks, meant) {
		meant = "np"
	}
	if meant != "" {
		hint = fmt.Sprintf("did you mean %s?", flagName(c.Flags().Lookup(meant)))
	}
	return fmt.Errorf("there is no flag %s: %s", given, hint)
}

// noEmptyFlags refuses flags that were given without a value, as by a variable of a script that is not set: without them
// the command would do something else.
func noEmptyFlags(c *cobra.Command) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		if text := f.Value.String(); err == nil && (text == "" || text == "[]") {
			_, usage := pflag.UnquoteUsage(f)
			err = fmt.Errorf("%s is empty: %s", flagName(f), usage)
		}
	})
	return err
}

// byFlags has an error about settings name the flags that gave them, in place of the variables.
func byFlags(err error, flags map[string]string) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for variable, flag := range flags {
		text = strings.ReplaceAll(text, variable+"=", flag+" ")
	}
	if text == err.Error() {
		return err
	}
	return errors.New(text)
}

// flagName is a flag as people write it.
func flagName(f *pflag.Flag) string {
	if f.Name == "np" {
		return "-np"
	}
	return "--" + f.Name
}

// allowed says which values a flag takes; that of a type of our own says it in its error.
func allowed(f *pflag.Flag, err error) string {
	switch f.Value.Type() {
	case "int":
		return "allowed is a whole number"
	case "uint64":
		return "allowed is a whole number from 0"
	case "duration":
		return "allowed is a time with its unit, such as 500ms, 5s or 2m"
	case "bool":
		return "allowed are true and false"
	}
	return err.Error()
}
