#!/bin/sh
# Repeats its argument, then every line it is given; ends with status 3 at the end of its input.
echo "$1"
while read -r line; do
    echo "$line"
done
exit 3
